"""Run the store where islands meet, until it is stopped: `python -m onefold.outer --port 29400`."""

from __future__ import annotations

import argparse
import threading


def main() -> None:
    """Listen on a port. The store keeps a few kilobytes for each run."""
    parser = argparse.ArgumentParser(prog="python -m onefold.outer", description=__doc__)
    parser.add_argument("--port", type=int, default=29400, help="port to listen on (29400)")
    port = parser.parse_args().port
    import torch.distributed as dist

    store = dist.TCPStore("0.0.0.0", port, is_master=True, wait_for_workers=False)
    print(f"islands meet at port {store.port}", flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
