"""Target and drafter: fetched or converted once, with the checksums of what was used."""


rule models_config:
    output:
        f"results/{EXPERIMENT}/models/config.yaml",
    log:
        f"results/{EXPERIMENT}/logs/models_config.log",
    conda:
        "../../environment.yml"
    params:
        text=get_models_text,
    shell:
        "printf '%s' {params.text:q} > {output} 2> {log}"


rule prepare:
    input:
        config=f"results/{EXPERIMENT}/models/config.yaml",
        trained=get_trained_drafter,
    output:
        target=f"results/{EXPERIMENT}/models/target.json",
        drafter=f"results/{EXPERIMENT}/models/drafter.json",
    log:
        f"results/{EXPERIMENT}/logs/prepare.log",
    conda:
        "../../environment.yml"
    params:
        out=subpath(output.target, parent=True),
        trained=f"--trained {TRAINING}/drafter" if TRAINED else "",
    shell:
        "dspark prepare --config {input.config} {params.trained} --out {params.out}"
        " 2>&1 | tee -i {log}"
