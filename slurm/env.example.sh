# shellcheck shell=bash
# What is your site's. Copy it to slurm/env.sh (git ignores that), change it, and
#
#   source slurm/env.sh && sbatch --nodes=2 slurm/train.sbatch configs/gpt2-124m.yaml
#
# Source it before sbatch: Slurm reads #SBATCH lines and the variables below as the job is submitted, not when it runs. The job gets this
# shell's environment, modules and virtual environment with it.

export SBATCH_ACCOUNT=my-project
export SBATCH_PARTITION=gpu
# export SBATCH_QOS=preemptible
# export SBATCH_CONSTRAINT=a100

# The environment: modules, then a virtual or conda environment on a disk that all nodes see; nothing where .venv is beside the checkout.
# module load cuda/12.6 gcc/13
# source /shared/me/pretrain/.venv/bin/activate

# Where the checkout is, if jobs are submitted from elsewhere and no active environment has pretrain.
# export PRETRAIN_ROOT=/shared/me/pretrain

# A container, by Pyxis: every srun of the job uses it.
# export SLURM_CONTAINER_IMAGE=/shared/images/pretrain.sqsh SLURM_CONTAINER_MOUNTS=/shared:/shared

# The network between nodes, if the first interface is not the fast one.
# export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0
# export NCCL_IB_HCA=mlx5_0,mlx5_1

# Models and data sets from the hub, fetched once where there is a network (model.init_from, --dataset).
# export HF_HOME=/shared/me/hf

# How often in a row, without a new step, a job starts again after a crash, and after a stop; at the next one it gives up (default 3).
# export PRETRAIN_CRASHES=3
