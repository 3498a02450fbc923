#!/usr/bin/env bash
# Installs the browser that the tests look at pages with, MLflow's and Snakemake's report, from the
# distribution's own packages (Debian).
set -euo pipefail

if command -v chromium >/dev/null; then exit 0; fi
if [ "$(id -u)" != 0 ]; then
  echo "install_chromium.sh: chromium is absent and installing it needs root: run it as root" >&2
  exit 1
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update --quiet --quiet
apt-get install --quiet --quiet --yes --no-install-recommends chromium
