"""The front door: python run_experiment.py [CONFIG.toml] [key=value ...]"""

if __name__ == "__main__":  # worker processes import this file too, and need nothing from it
    from fedsim.__main__ import run_main

    run_main()
