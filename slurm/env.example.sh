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

# A container, by Pyxis: options of the training's srun. (Only newer versions read PYXIS_CONTAINER_IMAGE and PYXIS_CONTAINER_MOUNTS, and then
# perhaps for the batch script as well, which needs scontrol.) What the image sets (ENV) goes before the job's environment, but for what
# PYXIS_CONTAINER_ENV names.
# export PRETRAIN_SRUN="--container-image=/shared/images/pretrain.sqsh --container-mounts=/shared:/shared"
# export PYXIS_CONTAINER_ENV=PATH,NCCL_DEBUG

# The network between nodes, if the first interface is not the fast one.
# export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0
# export NCCL_IB_HCA=mlx5_0,mlx5_1

# Models and data sets from the hub, fetched once where there is a network (model.init_from, --dataset).
# export HF_HOME=/shared/me/hf

# How often in a row, without a new step, a job starts again after a crash, and after a stop; at the next one it gives up (default 3).
# export PRETRAIN_CRASHES=3
