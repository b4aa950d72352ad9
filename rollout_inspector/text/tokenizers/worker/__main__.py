"""Starts the process of one tokenizer: ``python -I FOLDER/__main__.py SECONDS NICE``. It ends after so much rest."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # ``-I`` leaves out the folder of the product

if __name__ == "__main__":
    from rollout_inspector.text.tokenizers.worker.serving import main

    os.nice(int(sys.argv[2]))
    main(float(sys.argv[1]))
