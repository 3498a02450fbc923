"""Each dataset's resolved config and its prompts."""


rule job_config:
    output:
        f"results/{EXPERIMENT}/{{dataset}}/config.yaml",
    log:
        f"results/{EXPERIMENT}/logs/job_config/{{dataset}}.log",
    conda:
        "../../environment.yml"
    params:
        text=get_job_text,
    shell:
        "printf '%s' {params.text:q} > {output} 2> {log}"


rule prompts:
    input:
        config=f"results/{EXPERIMENT}/{{dataset}}/config.yaml",
    output:
        f"results/{EXPERIMENT}/{{dataset}}/prompts.jsonl",
    log:
        f"results/{EXPERIMENT}/logs/prompts/{{dataset}}.log",
    conda:
        "../../environment.yml"
    shell:
        "dspark prompts --config {input.config} --out {output} 2>&1 | tee -i {log}"
