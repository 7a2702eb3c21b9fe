//! Attachment of programs that outlives the daemon: links pinned in bpffs, which the next daemon adopts and updates.

use std::ffi::CString;
use std::fs::File;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use libbpf_rs::libbpf_sys;

use crate::Error;

/// Hook that a program is attached to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hook {
    /// tcx ingress of the interface.
    Ingress(u32),
    /// tcx ingress of the interface, before the programs that are attached there.
    FirstIngress(u32),
    /// tcx egress of the interface.
    Egress(u32),
    /// XDP of the interface, in its driver if the driver supports that.
    Xdp(u32),
}

/// `BPF_F_BEFORE`: without another program that it refers to, the program becomes the first one.
const ATTACH_FIRST: u32 = 1 << 3;
const XDP_FLAGS_SKB_MODE: u32 = 1 << 1;
const XDP_FLAGS_DRV_MODE: u32 = 1 << 2;

/// Adopts the link pinned at `pin` and replaces its program by `program`, or attaches `program` to `hook` and pins the
/// link.
///
/// # Errors
/// The kernel's error, with the hook.
pub fn attach(program: BorrowedFd<'_>, hook: Hook, pin: &Path) -> Result<OwnedFd, Error> {
    if let Some(link) = adopt_pinned_link(program, pin) {
        return Ok(link);
    }
    let link = attach_unpinned(program, hook)?;
    pin_link(&link, pin)?;
    Ok(link)
}

/// Attaches `program` to `hook` for as long as the link is open.
///
/// # Errors
/// The kernel's error, with the hook.
pub fn attach_unpinned(program: BorrowedFd<'_>, hook: Hook) -> Result<OwnedFd, Error> {
    match hook {
        Hook::Ingress(ifindex) => create(program, ifindex, libbpf_sys::BPF_TCX_INGRESS, 0),
        Hook::FirstIngress(ifindex) => {
            create(program, ifindex, libbpf_sys::BPF_TCX_INGRESS, ATTACH_FIRST)
        }
        Hook::Egress(ifindex) => create(program, ifindex, libbpf_sys::BPF_TCX_EGRESS, 0),
        Hook::Xdp(ifindex) => create(program, ifindex, libbpf_sys::BPF_XDP, XDP_FLAGS_DRV_MODE)
            .or_else(|_| create(program, ifindex, libbpf_sys::BPF_XDP, XDP_FLAGS_SKB_MODE)),
    }
    .map_err(|source| Error::Attach {
        what: format!("{hook:?}"),
        source,
    })
}

/// Does the same as [`attach`] for a socket-operations program on a cgroup.
///
/// # Errors
/// The cgroup cannot be opened, or the kernel refuses.
pub fn attach_cgroup(program: BorrowedFd<'_>, cgroup: &Path, pin: &Path) -> Result<OwnedFd, Error> {
    if let Some(link) = adopt_pinned_link(program, pin) {
        return Ok(link);
    }
    let what = || format!("socket operations on cgroup {}", cgroup.display());
    let directory = File::open(cgroup).map_err(|source| Error::Attach {
        what: what(),
        source,
    })?;
    let link = create(
        program,
        directory.as_raw_fd().cast_unsigned(),
        libbpf_sys::BPF_CGROUP_SOCK_OPS,
        0,
    )
    .map_err(|source| Error::Attach {
        what: what(),
        source,
    })?;
    pin_link(&link, pin)?;
    Ok(link)
}

fn adopt_pinned_link(program: BorrowedFd<'_>, pin: &Path) -> Option<OwnedFd> {
    let path = c_path(pin);
    // SAFETY: `path` is a NUL-terminated string that lives through the call.
    let fd = unsafe { libbpf_sys::bpf_obj_get(path.as_ptr()) };
    if fd < 0 {
        return None;
    }
    // SAFETY: the kernel has just given us this descriptor.
    let link = unsafe { OwnedFd::from_raw_fd(fd) };
    // SAFETY: both descriptors are open; no options are passed.
    let updated = unsafe {
        libbpf_sys::bpf_link_update(link.as_raw_fd(), program.as_raw_fd(), std::ptr::null())
    };
    if updated == 0 {
        return Some(link);
    }
    // A link of an interface that does not exist any more cannot be updated: the pin is removed and the program
    // attached anew.
    let _ = std::fs::remove_file(pin);
    None
}

fn create(
    program: BorrowedFd<'_>,
    target: u32,
    kind: libbpf_sys::bpf_attach_type,
    flags: u32,
) -> std::io::Result<OwnedFd> {
    let options = libbpf_sys::bpf_link_create_opts {
        sz: size_of::<libbpf_sys::bpf_link_create_opts>() as u64,
        flags,
        ..Default::default()
    };
    // SAFETY: `options` lives through the call and contains its own size.
    let fd = unsafe {
        libbpf_sys::bpf_link_create(
            program.as_raw_fd(),
            target.cast_signed(),
            kind,
            &raw const options,
        )
    };
    if fd < 0 {
        return Err(std::io::Error::from_raw_os_error(-fd));
    }
    // SAFETY: the kernel has just given us this descriptor.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn pin_link(link: &OwnedFd, pin: &Path) -> Result<(), Error> {
    let path = c_path(pin);
    // SAFETY: `path` is a NUL-terminated string that lives through the call; the descriptor is open.
    let result = unsafe { libbpf_sys::bpf_obj_pin(link.as_raw_fd(), path.as_ptr()) };
    if result == 0 {
        return Ok(());
    }
    let source = std::io::Error::from_raw_os_error(-result);
    Err(Error::Pin {
        path: pin.to_owned(),
        source,
    })
}

fn c_path(path: &Path) -> CString {
    // The configuration file cannot express a path with a NUL; the kernel refuses an empty path.
    CString::new(path.as_os_str().as_bytes()).unwrap_or_default()
}
