"""The table and the plots, pure functions of what was measured, and the mirror of all in MLflow."""


rule table:
    input:
        SUMMARIES,
    output:
        table=report(
            f"results/{EXPERIMENT}/table.md",
            caption="../report/table.rst",
            category="All datasets",
            labels={"result": "Table as markdown"},
        ),
        page=report(
            f"results/{EXPERIMENT}/table.html",
            caption="../report/table.rst",
            category="All datasets",
            labels={"result": "Table"},
        ),
    log:
        f"results/{EXPERIMENT}/logs/table.log",
    conda:
        "../../environment.yml"
    params:
        unpaired="--allow-unpaired" if COMPOSED.allow_unpaired else "",
    shell:
        "dspark table {input} {params.unpaired} --out {output.table} 2>&1 | tee -i {log};"
        " dspark table {input} {params.unpaired} --format html --out {output.page} 2>&1"
        " | tee -ia {log}"


rule plots:
    input:
        summaries=SUMMARIES,
        records=expand(
            f"results/{EXPERIMENT}/{{dataset}}/requests.parquet", dataset=DATASETS
        ),
    output:
        *get_plots(),
    log:
        f"results/{EXPERIMENT}/logs/plots.log",
    conda:
        "../../environment.yml"
    params:
        results=get_results,
        unpaired="--allow-unpaired" if COMPOSED.allow_unpaired else "",
    shell:
        "dspark plots {params.results} {input.summaries} {params.unpaired} 2>&1 | tee -i {log}"


rule command:
    output:
        f"results/{EXPERIMENT}/command.txt",
    log:
        f"results/{EXPERIMENT}/logs/command.log",
    conda:
        "../../environment.yml"
    params:
        text=get_command_text,
    shell:
        "printf '%s\\n' {params.text:q} > {output} 2> {log}"


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
        plots=rules.plots.output[0],
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
        " --out {output} 2>&1 | tee -i {log}"
