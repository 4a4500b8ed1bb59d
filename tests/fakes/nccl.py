"""What NCCL and torch write when a collective has failed, as in NCCLUtils.hpp and ProcessGroupNCCL.cpp."""

NCCL = """NCCL error in: ProcessGroupNCCL.cpp:3356, unhandled system error, NCCL version 2.27.7
ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.
Last error:
socketPollConnect: connect to 10.0.0.7<41231> returned Connection refused"""
NCCL_SHORT = (
    "NCCL error in: ProcessGroupNCCL.cpp:3356, unhandled system error, NCCL version 2.27.7; "
    "socketPollConnect: connect to 10.0.0.7<41231> returned Connection refused"
)
WATCHDOG = f"""step 7
[rank1]:[E1122 10:00:00.000 ProcessGroupNCCL.cpp:2068] [PG ID 0 Rank 1] Process group watchdog thread terminated with \
exception: {NCCL}
Exception raised from checkForNCCLErrorsInternal at ProcessGroupNCCL.cpp:2363 (most recent call first):
frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x80 (0x7f in libc10.so)
terminate called after throwing an instance of 'c10::DistBackendError'
"""
