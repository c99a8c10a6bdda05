# A classroom: JupyterLab with the lessons and the engine's CPU build, on port 8888. docs/teaching.md says how a
# class uses it. The context is what `make handout` writes, so no solution is in the image:
#
#   make handout
#   docker build -t minipaged-class out/handout
#   docker run -p 8888:8888 -v minipaged-work:/course/work minipaged-class
#
# The volume has what learners write; a newer image takes it over. The address with its token is printed.
FROM debian:bookworm-slim

RUN apt-get update -qq \
 && apt-get install -y -qq --no-install-recommends ca-certificates g++ git make python3 python3-venv \
 && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home learner \
 && mkdir -p /course/work \
 && chown -R learner /course

USER learner
WORKDIR /course
COPY --chown=learner . .
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN make setup TORCH_INDEX="$TORCH_INDEX"
# The C++ kernels are built and timed where the image runs, for its processor.

VOLUME /course/work
EXPOSE 8888
CMD ["make", "lab", "ARGS=--ip=0.0.0.0 --no-browser"]
