//! Builds the stack of libusrsctp, with our answers to some of its calls.
//!
//! Its source is in a package of the registry, so `Cargo.lock` says which it is; Debian's static library is not optimised, and costs
//! twice the time. Its socket calls get other names, so that `src/usrsctp/hooks.rs` answers them: it then sends what
//! the stack wants sent in batches, and starts no threads. It has no locks of its own (`c/no_locks.h`); its memory, its checksum, its timers
//! and the making of its hash tables are replaced by faster ones. The internal functions that take packets in (`ffi.rs`) are those of this version.

use std::path::{Path, PathBuf};
use std::process::Command;

const PACKAGE: &str = "datachannel-sys";
const SOURCE: &str = "libdatachannel/deps/usrsctp/usrsctplib";
/// Ours, which see the library's structures.
const EXTRA_SOURCES: [&str; 2] = ["c/prefetch.c", "c/round_trip.c"];
/// Ours, which each file includes first.
const NO_LOCKS_HEADER: &str = "c/no_locks.h";
/// Calls that get this before their names.
const HOOK_PREFIX: &str = "holdfast_usrsctp_";
const HOOKED_CALLS: [&str; 9] = [
    "malloc",
    "calloc",
    "free",
    "gettimeofday",
    "socket",
    "bind",
    "sendmsg",
    "pthread_create",
    "pthread_mutex_trylock",
];
/// Functions that are answered in `src/usrsctp/`, by `checksum.rs`, `tables.rs` and `timers.rs`, and in `c/round_trip.c`; and where the library has
/// its own, which get another name there.
const REPLACED_FUNCTIONS: [(&str, &[&str]); 3] = [
    ("netinet/sctp_crc32.c", &["sctp_calculate_cksum"]),
    (
        "netinet/sctputil.c",
        &["sctp_hashinit_flags", "sctp_calculate_rto"],
    ),
    (
        "netinet/sctp_callout.c",
        &[
            "sctp_get_tick_count",
            "sctp_os_timer_start",
            "sctp_os_timer_stop",
            "sctp_handle_tick",
        ],
    ),
];
/// What the library is told of this system (`CMakeLists.txt`), and that it is not a kernel's.
const DEFINES: [&str; 12] = [
    "__Userspace__",
    "SCTP_SIMPLE_ALLOCATOR",
    "SCTP_PROCESS_LEVEL_LOCKS",
    "INET",
    "INET6",
    "_GNU_SOURCE",
    "HAVE_LINUX_IF_ADDR_H",
    "HAVE_LINUX_RTNETLINK_H",
    "HAVE_NETINET_IP_ICMP_H",
    "HAVE_NET_ROUTE_H",
    "HAVE_STDATOMIC_H",
    "NDEBUG",
];

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    for file in EXTRA_SOURCES.into_iter().chain([NO_LOCKS_HEADER]) {
        println!("cargo:rerun-if-changed={file}");
    }
    let source = package_folder(PACKAGE).join(SOURCE);
    println!("cargo:rerun-if-changed={}", source.display());
    let patched: Vec<PathBuf> = REPLACED_FUNCTIONS
        .iter()
        .map(|(file, _)| source.join(file))
        .collect();
    let mut objects = Vec::new();
    for (file, (_, functions)) in patched.iter().zip(REPLACED_FUNCTIONS) {
        let mut build = library_build(&source);
        for function in functions {
            build.define(function, format!("holdfast_unused_{function}").as_str());
        }
        objects.extend(build.file(file).compile_intermediates());
    }
    let folders = ["", "netinet", "netinet6"].map(|folder| source.join(folder));
    let files = folders.iter().flat_map(|folder| c_files(folder));
    let files = files.filter(|file| !patched.contains(file));
    let mut build = library_build(&source);
    build
        .files(files)
        .files(EXTRA_SOURCES)
        .objects(objects)
        .compile("holdfast_usrsctp");
}

/// How each file is compiled: optimised whatever the profile.
fn library_build(source: &Path) -> cc::Build {
    let mut build = cc::Build::new();
    build
        .include(source)
        .opt_level(2)
        .warnings(false)
        .flag("-Wno-address-of-packed-member")
        .flag("-include")
        .flag(NO_LOCKS_HEADER);
    for name in DEFINES {
        build.define(name, None);
    }
    for call in HOOKED_CALLS {
        build.define(call, format!("{HOOK_PREFIX}{call}").as_str());
    }
    build
}

/// The folder of a package that `Cargo.lock` names.
fn package_folder(name: &str) -> PathBuf {
    let cargo = std::env::var_os("CARGO").expect("cargo says which it is");
    let output = Command::new(cargo)
        .args(["metadata", "--locked", "--format-version=1"])
        .output()
        .unwrap_or_else(|error| panic!("cannot ask cargo for the source of libusrsctp: {error}"));
    assert!(
        output.status.success(),
        "cargo does not say where {name} is, which has the source of libusrsctp: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    let metadata: serde_json::Value =
        serde_json::from_slice(&output.stdout).expect("cargo's metadata are JSON");
    let mut packages = metadata["packages"].as_array().into_iter().flatten();
    let package = packages.find(|package| package["name"] == name);
    let manifest = package.and_then(|package| package["manifest_path"].as_str());
    let manifest = manifest.unwrap_or_else(|| panic!("cargo knows no package {name}"));
    Path::new(manifest)
        .parent()
        .expect("a manifest is in a folder")
        .to_owned()
}

/// The C files of a folder, in order.
fn c_files(folder: &Path) -> Vec<PathBuf> {
    let entries = folder
        .read_dir()
        .unwrap_or_else(|error| panic!("cannot read {}: {error}", folder.display()));
    let mut files: Vec<_> = entries.flatten().map(|entry| entry.path()).collect();
    files.retain(|file| file.extension().is_some_and(|extension| extension == "c"));
    files.sort();
    files
}
