"""The program of the confined process: ``python -I FOLDER/__main__.py``. It imports, then confines itself."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # ``-I`` leaves out the folder of the product

if __name__ == "__main__":
    from rollouts.sampling.engines.vllm_parsers.serving import main

    main()
