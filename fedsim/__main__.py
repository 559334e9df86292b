"""`python -m fedsim`."""

if __name__ == "__main__":
    from fedsim.cli import main

    main()
