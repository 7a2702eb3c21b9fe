//! Compiles the eBPF programs with clang. Debian's clang-14 suffices; no kernel headers beyond the C library's are
//! used.

use std::path::Path;
use std::process::Command;

fn main() {
    let out = std::env::var("OUT_DIR").expect("cargo sets OUT_DIR");
    let arch = std::env::var("CARGO_CFG_TARGET_ARCH").expect("cargo sets the architecture");
    for object in [
        "holdfast",
        "congestion",
        "landlock",
        "keyrings",
        "socket_snapshots",
        "descriptors",
        "accept_queue",
        "reuseport",
        "rto_max",
        "traffic",
        "replicate",
    ] {
        compile(object, Path::new(&out), &arch);
    }
    println!("cargo:rerun-if-changed=c");
}

fn compile(object: &str, out: &Path, arch: &str) {
    let target = out.join(format!("{object}.bpf.o"));
    let status = Command::new(std::env::var("CLANG").unwrap_or_else(|_| "clang".into()))
        .args([
            "-target",
            "bpf",
            "-mcpu=v3",
            "-O2",
            "-g",
            "-Wall",
            "-Werror",
            "-Wno-unused-value",
            "-Wno-unused-function",
        ])
        .arg(format!("-idirafter/usr/include/{arch}-linux-gnu"))
        .arg(format!(
            "-D__TARGET_ARCH_{}",
            if arch == "x86_64" { "x86" } else { "arm64" }
        ))
        .args(["-c", &format!("c/{object}.bpf.c"), "-o"])
        .arg(&target)
        .status();
    match status {
        Ok(status) if status.success() => {}
        Ok(status) => panic!("clang failed on c/{object}.bpf.c: {status}"),
        Err(error) => panic!(
            "clang is needed to build the eBPF programs (Debian: apt-get install clang libbpf-dev): {error}"
        ),
    }
}
