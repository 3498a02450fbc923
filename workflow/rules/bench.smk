"""The measurement: one job a dataset runs all its arms on one device."""


rule bench:
    input:
        config=f"results/{EXPERIMENT}/{{dataset}}/config.yaml",
        prompts=f"results/{EXPERIMENT}/{{dataset}}/prompts.jsonl",
        target=f"results/{EXPERIMENT}/models/target.json",
        drafter=f"results/{EXPERIMENT}/models/drafter.json",
        code=ENGINE_CODE,
    output:
        requests=f"results/{EXPERIMENT}/{{dataset}}/requests.parquet",
        lossless=f"results/{EXPERIMENT}/{{dataset}}/lossless.json",
        environment=f"results/{EXPERIMENT}/{{dataset}}/environment.json",
    log:
        f"results/{EXPERIMENT}/logs/bench/{{dataset}}.log",
    conda:
        "../../environment.yml"
    threads: get_bench_threads
    resources:
        gpu=get_gpus,
    params:
        models=subpath(input.target, parent=True),
        out=subpath(output.requests, parent=True),
    shell:
        "dspark bench --config {input.config} --prompts {input.prompts}"
        " --models {params.models} --threads {threads} --out {params.out} 2>&1 | tee {log}"


rule summarise:
    input:
        config=f"results/{EXPERIMENT}/{{dataset}}/config.yaml",
        prompts=f"results/{EXPERIMENT}/{{dataset}}/prompts.jsonl",
        target=f"results/{EXPERIMENT}/models/target.json",
        requests=f"results/{EXPERIMENT}/{{dataset}}/requests.parquet",
        lossless=f"results/{EXPERIMENT}/{{dataset}}/lossless.json",
        environment=f"results/{EXPERIMENT}/{{dataset}}/environment.json",
    output:
        expand(f"results/{EXPERIMENT}/{{{{dataset}}}}/{{run}}/summary.json", run=RUNS),
    log:
        f"results/{EXPERIMENT}/logs/summarise/{{dataset}}.log",
    conda:
        "../../environment.yml"
    params:
        models=subpath(input.target, parent=True),
        folder=subpath(input.config, parent=True),
    shell:
        "dspark summarise --models {params.models} {params.folder} 2>&1 | tee {log}"
