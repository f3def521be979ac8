"""Jupyter kernels that are forked from a process in which PyTorch and other large libraries are loaded, since each
notebook would need 9 s of CPU time to load them. This process does not import fastai: it looks whether it runs in
Jupyter when it is imported.

    python forked_kernels.py serve ADDRESS                     # forks when it is asked to
    python forked_kernels.py start ADDRESS CONNECTION_FILE     # asks for a kernel, and ends with it
"""
import os
import signal
import socket
import sys


def serve(address):
    "Forks a kernel for each connection, which stays open until the kernel has ended"
    os.environ['MPLBACKEND'] = 'module://matplotlib_inline.backend_inline'  # as a kernel does; matplotlib reads it once
    import ipykernel.kernelapp
    import matplotlib.pyplot
    import pandas
    import sklearn.metrics
    import torchvision
    server = socket.socket(socket.AF_UNIX)
    server.bind(address)
    server.listen()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the kernels
    while True:
        connection, _ = server.accept()
        if os.fork() == 0: break
        connection.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    folder, connection_file = connection.recv(4096).decode().split('\n')
    os.chdir(folder)
    ipykernel.kernelapp.launch_new_instance(argv=['-f', connection_file])


def start(address, connection_file):
    "Starts a kernel in the current folder, and waits until it has ended"
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Jupyter interrupts a kernel before it asks it to end
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    connection.sendall(f'{os.getcwd()}\n{connection_file}'.encode())
    connection.recv(1)


if __name__ == '__main__':
    _, name, *args = sys.argv
    commands = dict(serve=serve, start=start)
    commands[name](*args)
