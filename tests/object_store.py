"""A store that speaks S3, in memory, until nobody holds the other end of its input; tells its address."""

import sys

from moto.server import ThreadedMotoServer


def main() -> None:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    print("http://{}:{}".format(*server.get_host_and_port()), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
