"""`python -m dspine_hub`."""

from dspine_hub.cli import main

if __name__ == "__main__":
    main(prog_name="dspine-hub")
