"""Run the command line with `python -m fedsim`."""

if __name__ == "__main__":
    from fedsim_main import main

    main()
