#!/usr/bin/env bash
# Installs the SLURM that one_node.sh starts, from the distribution's own packages (Debian, Ubuntu).
set -euo pipefail

installed() {
  local program
  for program in munged slurmctld slurmd sbatch; do
    command -v "$program" >/dev/null || return 1
  done
}

if installed; then exit 0; fi
if [ "$(id -u)" != 0 ]; then
  echo "install.sh: SLURM is absent and installing it needs root: run it as root" >&2
  exit 1
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update --quiet --quiet
apt-get install --quiet --quiet --yes --no-install-recommends \
  munge slurm-client slurm-wlm-basic-plugins slurmctld slurmd
