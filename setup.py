"""What pyproject.toml cannot say: the CPU kernels, built where there is a C++ compiler."""

from glob import glob

from setuptools import Extension, setup

# Not a module: worker/kernels/native.py loads it with ctypes. It is compiled for OpenMP, but not
# linked to it, so that it uses the runtime that torch has loaded.
KERNELS = Extension(
    "longshore.worker.kernels._native",
    sources=["worker/kernels/native/library.cpp"],
    depends=glob("worker/kernels/native/*.h"),
    language="c++",
    extra_compile_args=["-std=gnu++17", "-O3", "-g0", "-fopenmp", "-fno-exceptions", "-Wno-psabi"],
    extra_link_args=["-Wl,--as-needed"],
    optional=True,  # without a compiler, plain torch computes
)

setup(ext_modules=[KERNELS])
