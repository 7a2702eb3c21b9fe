//! Gives the stack of libusrsctp our socket calls.
//!
//! Some calls of the static library are renamed, so that `src/transport/usrsctp/hooks.rs` answers them: it then sends what
//! the stack wants sent in batches, starts no threads and has no locks of its own; its checksum, its timers and the making of its hash tables
//! are replaced by faster ones. The library itself is Debian's, unchanged otherwise; the internal
//! functions that take packets in (`ffi.rs`) are those of 0.9.5, so another version is refused here.

use std::path::{Path, PathBuf};
use std::process::Command;

const VERSION: &str = "0.9.5";
const RENAMED: [&str; 7] = [
    "socket",
    "bind",
    "sendmsg",
    "pthread_create",
    "pthread_mutex_lock",
    "pthread_mutex_unlock",
    "pthread_mutex_trylock",
];
/// Answered in `src/transport/usrsctp/`: `checksum.rs`, `tables.rs` and `timers.rs`.
const REPLACED: [&str; 6] = [
    "sctp_calculate_cksum",
    "sctp_hashinit_flags",
    "sctp_get_tick_count",
    "sctp_os_timer_start",
    "sctp_os_timer_stop",
    "sctp_handle_tick",
];
const HINT: &str = "(Debian: apt-get install libusrsctp-dev binutils)";

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    let library = find_library();
    let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let ours = out.join("libholdfast_usrsctp.a");
    rename_calls(&library, &ours);
    println!("cargo:rerun-if-changed={}", library.display());
    println!("cargo:rustc-link-search=native={}", out.display());
    println!("cargo:rustc-link-lib=static=holdfast_usrsctp");
}

fn find_library() -> PathBuf {
    let version = pkg_config("--modversion");
    assert!(
        version.starts_with(VERSION),
        "libusrsctp {version} is installed, {VERSION} is needed"
    );
    let folder = pkg_config("--variable=libdir");
    let library = Path::new(&folder).join("libusrsctp.a");
    assert!(library.is_file(), "{} is missing {HINT}", library.display());
    library
}

fn pkg_config(question: &str) -> String {
    let output = Command::new("pkg-config")
        .args([question, "usrsctp"])
        .output()
        .unwrap_or_else(|error| panic!("pkg-config is needed to find libusrsctp: {error}"));
    assert!(
        output.status.success(),
        "libusrsctp is needed for SCTP where the kernel has none {HINT}"
    );
    String::from_utf8_lossy(&output.stdout).trim().to_owned()
}

fn rename_calls(from: &Path, to: &Path) {
    let objcopy = std::env::var("OBJCOPY").unwrap_or_else(|_| "objcopy".into());
    let status = Command::new(&objcopy)
        .args(
            RENAMED
                .iter()
                .map(|call| format!("--redefine-sym={call}=holdfast_usrsctp_{call}")),
        )
        .args(
            REPLACED
                .iter()
                .map(|function| format!("--weaken-symbol={function}")),
        )
        .args([from, to])
        .status();
    match status {
        Ok(status) if status.success() => {}
        Ok(status) => panic!("{objcopy} failed on {}: {status}", from.display()),
        Err(error) => panic!("{objcopy} is needed {HINT}: {error}"),
    }
}
