"""The table, a pure function of the summaries, and the mirror of cells and training in MLflow."""


rule table:
    input:
        SUMMARIES,
    output:
        report(
            f"results/{EXPERIMENT}/table.md",
            caption="../report/table.rst",
            category="Results",
        ),
    log:
        f"results/{EXPERIMENT}/logs/table.log",
    conda:
        "../../environment.yml"
    shell:
        "dspark table {input} --out {output} 2>&1 | tee {log}"


rule tracking_config:
    output:
        f"results/{EXPERIMENT}/tracking.yaml",
    log:
        f"results/{EXPERIMENT}/logs/tracking_config.log",
    conda:
        "../../environment.yml"
    params:
        text=get_tracking_text,
    shell:
        "printf '%s' {params.text:q} > {output} 2> {log}"


rule track:
    input:
        config=f"results/{EXPERIMENT}/tracking.yaml",
        table=f"results/{EXPERIMENT}/table.md",
        summaries=SUMMARIES,
        trained=get_trained_drafter,
    output:
        f"results/{EXPERIMENT}/mlflow.json",
    log:
        f"results/{EXPERIMENT}/logs/track.log",
    conda:
        "../../environment.yml"
    params:
        results=subpath(input.table, parent=True),
        training=f"--training {TRAINING}" if TRAINED else "",
    shell:
        "dspark track {params.results} {input.summaries} --config {input.config} {params.training}"
        " --out {output} 2>&1 | tee {log}"
