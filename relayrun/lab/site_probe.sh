#!/usr/bin/env bash
# The job of `relayrun site probe`: site_probe.sh FOLDER MODULE... It writes one fact a line to FOLDER/facts, `NAME VALUE`,
# makes FOLDER/done, and waits to be requeued and cancelled.
set -uo pipefail
((${SLURM_RESTART_COUNT:-0} == 0)) || exit 0
folder="$1"
shift
unset "${!SQUEUE_@}" "${!SCANCEL_@}"
step=(srun --overlap --cpus-per-task=1 --cpu-bind=none --mem=0 --input=none)

say() { # name, value
  printf '%s %s\n' "$1" "$2" >>"${folder}/facts"
}

say batch_host "${SLURMD_NODENAME}"
say connection_ports "$(tr '\t' '-' </proc/sys/net/ipv4/ip_local_port_range)"
for name in $(compgen -e | grep -E '^(SBATCH|SRUN|NCCL|FI|UCX|OMP|CUDA|ROCR|HIP)_'); do say variables "${name}"; done
for name in "$@"; do
  (module load "${name}") >/dev/null 2>&1 || say modules "${name}"
done
say by-name "$("${step[@]}" --nodes=1 --ntasks=1 --nodelist="${SLURMD_NODENAME}" printenv SLURMD_NODENAME)"
say by-number "$("${step[@]}" --nodes=1 --ntasks=1 --relative=0 printenv SLURMD_NODENAME)"

# the node's clock, and the controller's a moment later; both in seconds since 1970
# shellcheck disable=SC2016
"${step[@]}" --nodes="${SLURM_NNODES}" --ntasks="${SLURM_NNODES}" --ntasks-per-node=1 \
  bash -c 'echo "clock ${SLURMD_NODENAME} $(date +%s)"' >>"${folder}/facts"
say controller "$(SLURM_TIME_FORMAT=%s sdiag | sed -n 's/^sdiag output at .*(\([0-9]*\))$/\1/p')"

"${step[@]}" --nodes=1 --ntasks=1 --job-name=relayrun-probe sleep 60 2>"${folder}/cancelled" &
for _ in {1..20}; do
  sleep 0.5
  number="$(squeue --noheader --steps --jobs="${SLURM_JOB_ID}" --format='%i %j' | sed -n 's/ relayrun-probe$//p')"
  [[ -z "${number}" ]] || break
done
[[ -z "${number}" ]] || scancel "${number}"
wait
touch "${folder}/done"
sleep 120
