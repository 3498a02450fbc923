"""A drafter made for the experiment's target: synthesise -> cache -> fit -> calibrate.

Each stage keeps what it has in the training's folder and goes on there after a kill, so only what is
whole is declared as output: Snakemake deletes the outputs of a failed job. The .done files hold a
checksum of what the stage made; the next stage runs again when, and only when, that changes.
"""


rule training_config:
    output:
        f"{TRAINING}/config.yaml",
    log:
        f"{TRAINING}/logs/training_config.log",
    conda:
        "../../environment.yml"
    params:
        text=get_models_text,
    shell:
        "printf '%s' {params.text:q} > {output} 2> {log}"


rule synthesise:
    input:
        config=f"{TRAINING}/config.yaml",
        own=get_prompt_files,
    output:
        f"{TRAINING}/conversations.jsonl",
    log:
        f"{TRAINING}/logs/synthesise.log",
    conda:
        "../../environment.yml"
    threads: get_bench_threads
    resources:
        gpu=get_training_gpus,
    params:
        out=subpath(input.config, parent=True),
    shell:
        "dspark train --stage synthesise --config {input.config} --out {params.out}"
        " 2>&1 | tee -i {log}"


rule cache_states:
    input:
        config=f"{TRAINING}/config.yaml",
        conversations=f"{TRAINING}/conversations.jsonl",
    output:
        f"{TRAINING}/cache.done",
    log:
        f"{TRAINING}/logs/cache.log",
    conda:
        "../../environment.yml"
    threads: get_bench_threads
    resources:
        gpu=get_training_gpus,
    params:
        out=subpath(input.config, parent=True),
    shell:
        "dspark train --stage cache --config {input.config} --out {params.out} 2>&1 | tee -i {log};"
        " sha256sum {params.out}/cache/index.json > {output}"


rule fit:
    input:
        config=f"{TRAINING}/config.yaml",
        cache=f"{TRAINING}/cache.done",
    output:
        f"{TRAINING}/fit.done",
    log:
        f"{TRAINING}/logs/fit.log",
    conda:
        "../../environment.yml"
    threads: get_bench_threads
    resources:
        gpu=get_training_gpus,
    params:
        out=subpath(input.config, parent=True),
    shell:
        "dspark train --stage fit --config {input.config} --out {params.out} 2>&1 | tee -i {log};"
        " sha256sum {params.out}/best/model.safetensors > {output}"


rule calibrate:
    input:
        config=f"{TRAINING}/config.yaml",
        fit=f"{TRAINING}/fit.done",
    output:
        config=f"{TRAINING}/drafter/config.json",
        weights=f"{TRAINING}/drafter/model.safetensors",
        calibration=f"{TRAINING}/drafter/calibration.json",
        reliability=report(
            f"{TRAINING}/reliability.png",
            caption="../report/reliability.rst",
            category="Training",
        ),
    log:
        f"{TRAINING}/logs/calibrate.log",
    conda:
        "../../environment.yml"
    threads: get_bench_threads
    resources:
        gpu=get_training_gpus,
    params:
        out=subpath(input.config, parent=True),
    shell:
        "dspark train --stage calibrate --config {input.config} --out {params.out}"
        " 2>&1 | tee -i {log}"
