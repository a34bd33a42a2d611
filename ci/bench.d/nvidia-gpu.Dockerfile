# A careful hand-written Dockerfile: the same headers and compiler, the same strip, and a build stage that leaves no trace in
# the final image. ci/bench supplies `base` and `runtime`.
ARG base
ARG runtime
FROM ${base} AS modules
ARG kernel
COPY source/ /build/
RUN set -eu; \
    cd /build; \
    make -j"$(nproc)" KERNEL_UNAME="$kernel" SYSSRC="/lib/modules/$kernel/source" SYSOUT="/lib/modules/$kernel/build" modules; \
    mkdir -p "/out/usr/lib/modules/$kernel/extra"; \
    cp ./*.ko "/out/usr/lib/modules/$kernel/extra/"; \
    strip --strip-debug "/out/usr/lib/modules/$kernel/extra/"*.ko; \
    depmod -b /out/usr "$kernel"

FROM ${runtime}
COPY --from=modules /out /
ENTRYPOINT ["sh", "-c", "modprobe -a nvidia nvidia-uvm nvidia-modeset && exec sleep infinity"]
