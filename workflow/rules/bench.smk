"""The measurement: one job a dataset, or one a shard of it, runs all its arms on one device."""


# Both can make a dataset's records: bench those of one that is not cut into shards.
ruleorder: merge > bench


rule bench:
    input:
        config=f"results/{EXPERIMENT}/{{dataset}}/config.yaml",
        prompts=f"results/{EXPERIMENT}/{{dataset}}/prompts.jsonl",
        target=f"results/{EXPERIMENT}/models/target.json",
        drafter=f"results/{EXPERIMENT}/models/drafter.json",
        code=ENGINE_CODE,
    output:
        requests=f"results/{EXPERIMENT}/{{dataset}}{{shard}}/requests.parquet",
        lossless=f"results/{EXPERIMENT}/{{dataset}}{{shard}}/lossless.json",
        environment=f"results/{EXPERIMENT}/{{dataset}}{{shard}}/environment.json",
    log:
        f"results/{EXPERIMENT}/logs/bench/{{dataset}}{{shard}}.log",
    conda:
        "../../environment.yml"
    threads: get_bench_threads
    resources:
        **get_asked_resources(),
        gpu=get_gpus,
    params:
        models=subpath(input.target, parent=True),
        shard=get_shard,
        out=subpath(input.config, parent=True),
    shell:
        "dspark bench --config {input.config} --prompts {input.prompts} --models {params.models}"
        " --threads {threads} --shard {params.shard} --out {params.out} 2>&1 | tee -i {log}"


rule merge:
    input:
        config=f"results/{EXPERIMENT}/{{dataset}}/config.yaml",
        prompts=f"results/{EXPERIMENT}/{{dataset}}/prompts.jsonl",
        shards=get_shard_records,
    output:
        requests=f"results/{EXPERIMENT}/{{dataset}}/requests.parquet",
        lossless=f"results/{EXPERIMENT}/{{dataset}}/lossless.json",
        environment=f"results/{EXPERIMENT}/{{dataset}}/environment.json",
    log:
        f"results/{EXPERIMENT}/logs/merge/{{dataset}}.log",
    wildcard_constraints:
        dataset="|".join(SHARDED),
    localrule: True
    conda:
        "../../environment.yml"
    params:
        folder=subpath(input.config, parent=True),
    shell:
        "dspark merge {params.folder} 2>&1 | tee -i {log}"


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
        "dspark summarise --models {params.models} {params.folder} 2>&1 | tee -i {log}"
