//! Names of Unix sockets in the kernel's format: a path, or a NUL and any bytes, or nothing.

use holdfast_sys::sockopt::check;
use std::io;
use std::mem::offset_of;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

const PATH_OFFSET: usize = offset_of!(libc::sockaddr_un, sun_path);

/// Returns the address with this name, and its length.
pub fn to_sockaddr(name: &[u8]) -> io::Result<(libc::sockaddr_un, libc::socklen_t)> {
    // SAFETY: all-zero bytes are a valid `sockaddr_un`.
    let mut address: libc::sockaddr_un = unsafe { std::mem::zeroed() };
    address.sun_family = libc::AF_UNIX as libc::sa_family_t;
    if name.len() > address.sun_path.len() {
        return Err(io::Error::from(io::ErrorKind::InvalidInput));
    }
    for (to, from) in address.sun_path.iter_mut().zip(name) {
        *to = *from as libc::c_char;
    }
    // A path ends with a NUL if there is space for one.
    let path = name.first().is_some_and(|first| *first != 0);
    let length =
        PATH_OFFSET + name.len() + usize::from(path && name.len() < address.sun_path.len());
    Ok((address, length as libc::socklen_t))
}

/// Returns the address with this name in the kernel's layout.
pub fn to_sockaddr_bytes(name: &[u8]) -> io::Result<Vec<u8>> {
    let (address, length) = to_sockaddr(name)?;
    let mut bytes = address.sun_family.to_ne_bytes().to_vec();
    bytes.extend(address.sun_path.iter().map(|byte| *byte as u8));
    bytes.truncate(length as usize);
    Ok(bytes)
}

/// Returns the name in an address of this length.
pub fn name(address: &libc::sockaddr_un, length: libc::socklen_t) -> Vec<u8> {
    let length = (length as usize)
        .saturating_sub(PATH_OFFSET)
        .min(address.sun_path.len());
    let bytes: Vec<u8> = address.sun_path[..length]
        .iter()
        .map(|byte| *byte as u8)
        .collect();
    match bytes.first() {
        None | Some(0) => bytes,
        Some(_) => bytes
            .split(|byte| *byte == 0)
            .next()
            .unwrap_or_default()
            .to_vec(),
    }
}

/// Returns the name that a socket is bound to.
pub fn bound_name(fd: BorrowedFd<'_>) -> io::Result<Vec<u8>> {
    let (mut address, _) = to_sockaddr(&[])?;
    let mut length = size_of::<libc::sockaddr_un>() as libc::socklen_t;
    let raw = (&raw mut address).cast();
    // SAFETY: `address` is writable for `length` bytes and both outlive the call.
    check(unsafe { libc::getsockname(fd.as_raw_fd(), raw, &raw mut length) })?;
    Ok(name(&address, length))
}

/// Returns the file of a socket that is bound to a path, opened with `O_PATH`.
pub fn open_bound_file(fd: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    /// `linux/un.h`.
    const SIOCUNIXFILE: libc::c_ulong = 0x89e0;
    // SAFETY: the request takes no pointer.
    let file = unsafe { libc::ioctl(fd.as_raw_fd(), SIOCUNIXFILE) };
    check(file)?;
    // SAFETY: the call succeeded, so `file` is a new descriptor that nothing else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(file) })
}

/// Binds a socket to a name (`bind(2)`).
pub fn bind(fd: BorrowedFd<'_>, name: &[u8]) -> io::Result<()> {
    let (address, length) = to_sockaddr(name)?;
    // SAFETY: `address` is readable for `length` bytes and outlives the call.
    check(unsafe { libc::bind(fd.as_raw_fd(), (&raw const address).cast(), length) })
}

/// Connects a socket to a name (`connect(2)`).
pub fn connect(fd: BorrowedFd<'_>, name: &[u8]) -> io::Result<()> {
    let (address, length) = to_sockaddr(name)?;
    // SAFETY: `address` is readable for `length` bytes and outlives the call.
    check(unsafe { libc::connect(fd.as_raw_fd(), (&raw const address).cast(), length) })
}
