//! Minimal netlink client: messages with attributes, requests with an answer, dumps (`linux/netlink.h`).

use crate::sockopt::{check, check_length};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

/// Length of a message header, bytes.
const HEADER_LEN: usize = 16;
/// Size of the receive buffer, bytes; the kernel fills at most 32 KiB of it per datagram of a dump.
const BUFFER_LEN: usize = 64 * 1024;

/// A netlink message under construction.
#[derive(Debug)]
pub struct NetlinkRequest {
    bytes: Vec<u8>,
}

impl NetlinkRequest {
    /// Starts a request of `kind` with `flags` (in addition to `NLM_F_REQUEST`) and the family's fixed part.
    #[must_use]
    pub fn new(kind: u16, flags: i32, fixed: &[u8]) -> Self {
        let mut bytes = Vec::with_capacity(128);
        bytes.extend_from_slice(&0u32.to_ne_bytes());
        bytes.extend_from_slice(&kind.to_ne_bytes());
        bytes.extend_from_slice(&((flags | libc::NLM_F_REQUEST) as u16).to_ne_bytes());
        bytes.extend_from_slice(&[0; 8]);
        bytes.extend_from_slice(fixed);
        Self { bytes }
    }

    /// Appends an attribute to the netlink request.
    #[must_use]
    pub fn attribute(mut self, kind: u16, value: &[u8]) -> Self {
        self.pad();
        let length = (value.len() + 4) as u16;
        self.bytes.extend_from_slice(&length.to_ne_bytes());
        self.bytes.extend_from_slice(&kind.to_ne_bytes());
        self.bytes.extend_from_slice(value);
        self
    }

    fn pad(&mut self) {
        while !self.bytes.len().is_multiple_of(4) {
            self.bytes.push(0);
        }
    }

    fn finish(mut self, sequence: u32) -> Vec<u8> {
        self.pad();
        let length = self.bytes.len() as u32;
        self.bytes[..4].copy_from_slice(&length.to_ne_bytes());
        self.bytes[8..12].copy_from_slice(&sequence.to_ne_bytes());
        self.bytes
    }
}

/// A netlink socket in the network namespace where it was made.
#[derive(Debug)]
pub struct Netlink {
    fd: OwnedFd,
    sequence: u32,
    buffer: Vec<u8>,
}

impl Netlink {
    /// Opens a socket of a netlink family, such as `NETLINK_ROUTE`.
    ///
    /// # Errors
    /// Errors of `socket(2)`.
    pub fn new(family: i32) -> io::Result<Self> {
        let kind = libc::SOCK_RAW | libc::SOCK_CLOEXEC;
        // SAFETY: no pointers are passed.
        let fd = unsafe { libc::socket(libc::AF_NETLINK, kind, family) };
        check(fd)?;
        Ok(Self {
            // SAFETY: the call succeeded, so `fd` is a new descriptor that nothing else owns.
            fd: unsafe { OwnedFd::from_raw_fd(fd) },
            sequence: 0,
            buffer: vec![0; BUFFER_LEN],
        })
    }

    /// Sends a request that changes something, and waits for the kernel's answer.
    ///
    /// # Errors
    /// The kernel's error, as an OS error.
    pub fn change(&mut self, message: NetlinkRequest) -> io::Result<()> {
        self.request(message, libc::NLM_F_ACK, |_, _| {})
    }

    /// Sends a request and passes every message of the answer (kind, bytes after the header) to `each`. `flags` are
    /// added to the request's own: `NLM_F_DUMP` for a dump, `NLM_F_ACK` for a request whose only answer is success or
    /// an error.
    ///
    /// # Errors
    /// The kernel's error, as an OS error.
    pub fn request(
        &mut self,
        mut message: NetlinkRequest,
        flags: i32,
        mut each: impl FnMut(u16, &[u8]),
    ) -> io::Result<()> {
        self.sequence = self.sequence.wrapping_add(1);
        let message_flags = u16::from_ne_bytes([message.bytes[6], message.bytes[7]]);
        let all_flags = message_flags | flags as u16;
        message.bytes[6..8].copy_from_slice(&all_flags.to_ne_bytes());
        let is_multi_part = i32::from(all_flags) & (libc::NLM_F_ACK | libc::NLM_F_DUMP) != 0;
        self.send(&message.finish(self.sequence))?;
        loop {
            let length = self.receive()?;
            let mut rest = &self.buffer[..length];
            while let Some((header, body, next)) = split(rest) {
                rest = next;
                if header.sequence != self.sequence {
                    continue;
                }
                match i32::from(header.kind) {
                    libc::NLMSG_DONE => return parse_end_of_dump(body),
                    libc::NLMSG_ERROR => return parse_error(body),
                    _ => each(header.kind, body),
                }
                if !is_multi_part {
                    return Ok(());
                }
            }
        }
    }

    fn send(&self, bytes: &[u8]) -> io::Result<()> {
        // SAFETY: `bytes` is readable for its length and outlives the call.
        let outcome =
            unsafe { libc::send(self.fd.as_raw_fd(), bytes.as_ptr().cast(), bytes.len(), 0) };
        check_length(outcome).map(|_| ())
    }

    fn receive(&mut self) -> io::Result<usize> {
        let buffer = &mut self.buffer;
        loop {
            // SAFETY: `buffer` is writable for its length and outlives the call.
            let outcome = unsafe {
                libc::recv(
                    self.fd.as_raw_fd(),
                    buffer.as_mut_ptr().cast(),
                    buffer.len(),
                    0,
                )
            };
            match check_length(outcome) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                other => return other,
            }
        }
    }
}

struct NetlinkHeader {
    kind: u16,
    sequence: u32,
}

/// Splits the first message off `bytes`: header, body, rest.
fn split(bytes: &[u8]) -> Option<(NetlinkHeader, &[u8], &[u8])> {
    let length = u32::from_ne_bytes(bytes.get(..4)?.try_into().ok()?) as usize;
    let body = bytes.get(HEADER_LEN..length)?;
    let header = NetlinkHeader {
        kind: u16::from_ne_bytes([bytes[4], bytes[5]]),
        sequence: u32::from_ne_bytes([bytes[8], bytes[9], bytes[10], bytes[11]]),
    };
    Some((
        header,
        body,
        bytes.get(length.next_multiple_of(4)..).unwrap_or(&[]),
    ))
}

/// Parses the status of a dump, which a failed dump sets. The answer to a request without a dump has none.
fn parse_end_of_dump(body: &[u8]) -> io::Result<()> {
    let status = body.get(..4).and_then(|word| word.try_into().ok());
    match status.map_or(0, i32::from_ne_bytes) {
        error @ i32::MIN..0 => Err(io::Error::from_raw_os_error(error.saturating_neg())),
        _ => Ok(()),
    }
}

fn parse_error(body: &[u8]) -> io::Result<()> {
    let number = body
        .get(..4)
        .and_then(|word| word.try_into().ok())
        .map_or(libc::EPROTO, i32::from_ne_bytes);
    match number.checked_neg() {
        Some(0) => Ok(()),
        Some(error) => Err(io::Error::from_raw_os_error(error)),
        None => Err(io::Error::from_raw_os_error(libc::EPROTO)),
    }
}

/// Iterates over the attributes in `bytes` as (kind without flag bits, value). Stops at the first truncated attribute.
pub fn attributes(bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    let mut rest = bytes;
    std::iter::from_fn(move || {
        let length = usize::from(u16::from_ne_bytes([*rest.first()?, *rest.get(1)?]));
        let kind = u16::from_ne_bytes([*rest.get(2)?, *rest.get(3)?]);
        let value = rest.get(4..length)?;
        rest = rest.get(length.next_multiple_of(4)..).unwrap_or(&[]);
        Some((kind & 0x3fff, value))
    })
}
