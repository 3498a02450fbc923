#!/usr/bin/env bash
# A SLURM cluster of this one machine, on loopback, with two GPUs that are only counted: for tests.
#
#   one_node.sh check    say why none can be started here, if so
#   one_node.sh up       start munged, slurmctld and slurmd; needs root and install.sh's packages
#   one_node.sh status   nodes and jobs
#   one_node.sh down     stop what `up` started, and cancel its jobs
#
# There is no accounting database: job states come from squeue, and sacct and sacctmgr do not answer.
# Partitions: gpu (the default) and h200, both on a node with the feature h200.
set -euo pipefail

FOLDER=/run/dspark-slurm
CONF=$FOLDER/slurm.conf
# The executor plugin hides SLURM_CONF from the steps that it starts, so they look here.
SYSTEM_CONF=/etc/slurm/slurm.conf
HOST=$(hostname -s)
GPUS=2
LIFETIME=2h # a forgotten cluster ends by itself
DAEMONS="slurmd slurmctld munged"
export SLURM_CONF=$CONF

fail() {
  echo "one_node.sh: $*" >&2
  exit 1
}

running() { # running NAME: is the recorded process still ours?
  local pid
  pid=$(cat "$FOLDER/$1.pid" 2>/dev/null) || return 1
  tr '\0' ' ' 2>/dev/null <"/proc/$pid/cmdline" | grep -q "$1 .*$FOLDER"
}

start() { # start NAME ARGUMENT...
  local name=$1
  shift
  nohup timeout --kill-after=10 "$LIFETIME" "$name" "$@" \
    >"$FOLDER/$name.out" 2>&1 </dev/null &
  echo $! >"$FOLDER/$name.pid"
}

wait_for() { # wait_for NAME COMMAND...: until the command succeeds, or NAME has ended
  local name=$1 deadline=$((SECONDS + 30))
  shift
  until timeout 5 "$@" >/dev/null 2>&1; do
    sleep 0.2
    if ! running "$name" || [ $SECONDS -ge $deadline ]; then
      tail -n 5 "$FOLDER/$name".{out,log} >&2 || true
      down
      fail "$name did not start: its last lines are above"
    fi
  done
}

check() {
  local program
  for program in munged slurmctld slurmd sbatch; do
    command -v "$program" >/dev/null || fail "$program is not installed: run 'make slurm' as root"
  done
  [ "$(id -u)" = 0 ] || fail "slurmd needs root: run as root"
  if [ -e "$SYSTEM_CONF" ] || [ -L "$SYSTEM_CONF" ]; then
    [ "$(readlink "$SYSTEM_CONF")" = "$CONF" ] ||
      fail "$SYSTEM_CONF belongs to another cluster: not touched, use a machine without one"
  fi
}

write_configuration() {
  mkdir -p "$FOLDER"/{state,spool} /etc/slurm
  # SLURM names GPUs in CUDA_VISIBLE_DEVICES only by the numbers of character devices.
  for index in $(seq 0 $((GPUS - 1))); do ln -sfn /dev/null "$FOLDER/nvidia$index"; done
  cat >"$FOLDER/gres.conf" <<END
AutoDetect=off
Name=gpu Type=h200 File=$FOLDER/nvidia[0-$((GPUS - 1))]
END
  # CPUs and memory are counted too (config_overrides): what the profile asks for fits any machine.
  # Without MinJobAge the controller would forget the jobs that a test asks about.
  cat >"$CONF" <<END
ClusterName=one
SlurmctldHost=$HOST(127.0.0.1)
SlurmctldPort=16817
SlurmdPort=16818
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$FOLDER/munge.socket
StateSaveLocation=$FOLDER/state
SlurmdSpoolDir=$FOLDER/spool
SlurmctldPidFile=$FOLDER/slurmctld.own.pid
SlurmdPidFile=$FOLDER/slurmd.own.pid
SlurmctldLogFile=$FOLDER/slurmctld.log
SlurmdLogFile=$FOLDER/slurmd.log
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0,sched_min_interval=0
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
GresTypes=gpu
DefMemPerCPU=1000
MinJobAge=3600
KillWait=5
SlurmdParameters=config_overrides
NodeName=$HOST NodeAddr=127.0.0.1 CPUs=16 RealMemory=65536 Gres=gpu:h200:$GPUS Feature=h200
PartitionName=gpu Nodes=$HOST Default=YES MaxTime=INFINITE State=UP
PartitionName=h200 Nodes=$HOST MaxTime=INFINITE State=UP
END
  [ -s "$FOLDER/munge.key" ] || (umask 077 && head -c 128 /dev/urandom >"$FOLDER/munge.key")
  ln -sfn "$CONF" "$SYSTEM_CONF"
}

up() {
  check
  local name
  for name in $DAEMONS; do
    if running "$name"; then fail "$name runs already: 'one_node.sh down' first"; fi
  done
  rm -rf "$FOLDER"
  write_configuration
  start munged --foreground --key-file="$FOLDER/munge.key" --socket="$FOLDER/munge.socket" \
    --pid-file="$FOLDER/munged.own.pid" --log-file="$FOLDER/munged.log" \
    --seed-file="$FOLDER/munge.seed"
  wait_for munged munge --socket="$FOLDER/munge.socket" --no-input
  start slurmctld -D -f "$CONF"
  wait_for slurmctld scontrol ping
  start slurmd -D -f "$CONF"
  wait_for slurmd sh -c 'sinfo --noheader --format=%T | grep -q idle'
  sinfo
}

status() {
  sinfo --format="%P %T %c %m %G"
  squeue
}

down() {
  local name
  if running slurmctld; then
    timeout 10 scancel --user="$(id -un)" || true
  fi
  for name in $DAEMONS; do
    if running "$name"; then
      kill "$(cat "$FOLDER/$name.pid")"
      while running "$name"; do sleep 0.1; done
    fi
    rm -f "$FOLDER/$name.pid"
  done
  if [ "$(readlink "$SYSTEM_CONF")" = "$CONF" ]; then rm "$SYSTEM_CONF"; fi
}

case ${1:-} in
  check | up | down | status) "$1" ;;
  *) fail "usage: one_node.sh check|up|down|status" ;;
esac
