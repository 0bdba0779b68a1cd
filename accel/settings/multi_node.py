"""Settings for several machines: ranks, rendezvous, and failures."""

from __future__ import annotations

from .setting import Group, Setting, switch

MACHINES = Group(
    "machines and GPUs",
    "Which GPUs here, and which machine this is. On a scheduler's node the scheduler says it: leave these out.",
    (
        Setting("gpu_ids", "the GPUs to use, e.g. 0,2 (default: all that are visible)", metavar="IDS",
                env="CUDA_VISIBLE_DEVICES"),
        switch("same_network", "accepted as Accelerate does; changes nothing", used_by=("gang",)),
        Setting("machine_rank", "which of the machines this is, from 0", "whole", metavar="R", used_by=("gang",)),
        Setting("main_process_ip", "a name or address of machine 0 that all can reach", metavar="HOST",
                env="MASTER_ADDR", used_by=("gang",)),
        Setting("main_process_port", "its port (default: any that is free on one machine, 29500 on several)", "whole",
                metavar="PORT", env="MASTER_PORT", used_by=("gang",)),
    ),
    example="--gpu_ids 0,2 train.py",
)  # fmt: skip

RENDEZVOUS = Group(
    "rendezvous",
    "How the machines find each other.",
    (
        Setting("rdzv_backend", "static: machine ranks as given; c10d: torch's elastic one", default="static",
                choices=("static", "c10d"), used_by=("gang",)),
        Setting("rdzv_conf", "k=v,… for the backend; timeout=SECONDS for both", default="", metavar="CONF", key="-",
                used_by=("gang",)),
        Setting("rdzv_id", "a name that all machines of this run give alike", metavar="ID", key="-",
                env="TORCHELASTIC_RUN_ID", used_by=("gang",)),
        Setting("role", "torchelastic's name for the workers", default="default", env="ROLE_NAME", key="-",
                used_by=("gang",)),
    ),
    example="--num_machines 1:4 --rdzv_backend c10d --main_process_ip node0 train.py",
)  # fmt: skip

FAILURES = Group(
    "failures and logs",
    "What happens when a rank fails, and where its output goes.",
    (
        Setting("max_restarts", "how often the whole gang is started again after a failure", "whole", 0, metavar="N",
                env="TORCHELASTIC_MAX_RESTARTS", key="-"),
        Setting("shutdown_timeout", "seconds between SIGTERM and SIGKILL when the gang ends", "seconds", 30.0,
                metavar="S", key="-"),
        Setting("log_dir", "write each rank's output to DIR/rank-R.aATTEMPT.log", metavar="DIR", key="-"),
        Setting("tee", "with --log_dir, print it too: 0 nothing, 1-3 all ranks, or LOCAL_RANK:3,…", default="0",
                short="-t", metavar="SPEC", key="-", when=("log_dir", True)),
        Setting("monitor_interval", "seconds between looks at the other machines", "seconds", 0.1, metavar="S",
                key="-", used_by=("gang",)),
        switch("debug", "Accelerator's debug mode: say which rank and shape disagrees instead of hanging",
               env="ACCELERATE_DEBUG_MODE", style="lower"),
        switch("quiet", "no report of a failure beyond the program's own", short="-q", key="-"),
    ),
    example="--max_restarts 3 --log_dir logs --tee 3 train.py",
)  # fmt: skip

PROGRAM = Group(
    "program and settings",
    "What is run, and where its settings come from.",
    (
        switch("module", "the program is a Python module, as `python -m`", short="-m", key="-"),
        switch("no_python", "the program is a command, not Python", key="-"),
        switch("compat", "`import accelerate` is answered by accel, in the program and in Python processes it starts",
               env="ACCEL_COMPAT", style="one", key="-"),
        Setting("config_file", "settings for what no flag says (default: the file that `accel config` writes)",
                metavar="FILE", key="-"),
        switch("explain", "print each setting, its value and where that comes from, and run nothing", key="-"),
    ),
    example="-m my.training --epochs 10",
)  # fmt: skip

MPI = Group(
    "MPI",
    "Ranks started by mpirun, for training on the CPUs of several machines.",
    (
        Setting("mpirun_hostfile", "start the ranks with mpirun on the hosts of this file", metavar="FILE",
                used_by=("mpi",)),
    ),
    section="mpirun_config",
    prefix="mpirun_",
    example="--cpu --mpirun_hostfile hosts --num_processes 8 train.py",
)  # fmt: skip
