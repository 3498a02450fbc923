import sys
from pathlib import Path

from snakemake.utils import min_version

min_version("9.27")


include: "workflow/rules/common.smk"
include: "workflow/rules/train.smk"
include: "workflow/rules/models.smk"
include: "workflow/rules/data.smk"
include: "workflow/rules/bench.smk"
include: "workflow/rules/report.smk"


localrules:
    all,
    training_config,
    models_config,
    prepare,
    job_config,
    prompts,
    tracking_config,
    summarise,
    table,
    plots,
    command,
    track,


onsuccess:
    table = Path(f"results/{EXPERIMENT}/table.md")
    if table.exists():
        print(f"The table is {table}", file=sys.stderr)


rule all:
    default_target: True
    input:
        f"results/{EXPERIMENT}/table.md",
        f"results/{EXPERIMENT}/command.txt",
        rules.plots.output[0],
        f"results/{EXPERIMENT}/mlflow.json",
