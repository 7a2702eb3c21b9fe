//! Reception of messages from the kernel, many per system call.

use super::abi;
use crate::AssocId;
use crate::event_assembler::{EventAssembler, MessageInfo};
use crate::socket_api_layout::{u16_at, u32_at};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

/// Most messages in one call.
const BATCH_MAX: usize = 64;
/// Length of a buffer for one piece of a message, bytes.
const BUFFER_LEN: usize = 8192;

#[repr(C, align(8))]
#[derive(Clone, Copy)]
struct Control([u8; 64]);

/// Buffers for one batch.
pub struct MessageReceiveBuffers {
    buffers: Vec<u8>,
    controls: Vec<Control>,
}

impl Default for MessageReceiveBuffers {
    fn default() -> Self {
        Self {
            buffers: vec![0; BATCH_MAX * BUFFER_LEN],
            controls: vec![Control([0; 64]); BATCH_MAX],
        }
    }
}

impl MessageReceiveBuffers {
    /// Reads one batch from the socket of `port`.
    pub fn read(
        &mut self,
        fd: BorrowedFd<'_>,
        port: u32,
        assembler: &mut EventAssembler,
    ) -> io::Result<()> {
        let mut vectors: [libc::iovec; BATCH_MAX] = std::array::from_fn(|index| libc::iovec {
            iov_base: self.buffers[index * BUFFER_LEN..].as_mut_ptr().cast(),
            iov_len: BUFFER_LEN,
        });
        let mut headers: [libc::mmsghdr; BATCH_MAX] = std::array::from_fn(|index| {
            // SAFETY: all-zero bytes are a valid `mmsghdr`.
            let mut header: libc::mmsghdr = unsafe { std::mem::zeroed() };
            header.msg_hdr.msg_iov = &raw mut vectors[index];
            header.msg_hdr.msg_iovlen = 1;
            header.msg_hdr.msg_control = self.controls[index].0.as_mut_ptr().cast();
            header.msg_hdr.msg_controllen = self.controls[index].0.len();
            header
        });
        // SAFETY: headers, vectors and the memory that they point to outlive the call.
        let count = unsafe {
            let (batch, wait) = (BATCH_MAX as libc::c_uint, std::ptr::null_mut());
            let flags = libc::MSG_DONTWAIT;
            libc::recvmmsg(
                fd.as_raw_fd(),
                headers.as_mut_ptr(),
                batch,
                flags as _,
                wait,
            )
        };
        let Ok(count) = usize::try_from(count) else {
            let error = io::Error::last_os_error();
            // Errors of associations are also reported by notifications.
            return match error.raw_os_error() {
                Some(libc::EBADF | libc::EINVAL | libc::EFAULT) => Err(error),
                _ => Ok(()),
            };
        };
        for (index, header) in headers[..count].iter().enumerate() {
            let length = (header.msg_len as usize).min(BUFFER_LEN);
            let bytes = &self.buffers[index * BUFFER_LEN..][..length];
            let is_end = header.msg_hdr.msg_flags & libc::MSG_EOR != 0;
            if header.msg_hdr.msg_flags & abi::MSG_NOTIFICATION != 0 {
                assembler.on_notification(port, bytes);
                continue;
            }
            let used = header.msg_hdr.msg_controllen.min(64);
            if let Some(info) = message_info(port, &self.controls[index].0[..used]) {
                assembler.add_message(bytes, &info, is_end);
            }
        }
        Ok(())
    }
}

/// Parses a control message with a `struct sctp_rcvinfo`, the only kind that was requested.
fn message_info(port: u32, control: &[u8]) -> Option<MessageInfo> {
    const HEADER_LEN: usize = size_of::<libc::cmsghdr>();
    let is_rcvinfo = u32_at(control, 8)? as i32 == libc::IPPROTO_SCTP
        && u32_at(control, 12)? as i32 == abi::CMSG_RCVINFO;
    let info = is_rcvinfo.then(|| control.get(HEADER_LEN..)).flatten()?;
    Some(MessageInfo {
        assoc: AssocId::new(port, u32_at(info, 24)?),
        stream: u16_at(info, 0)?,
        flags: u16_at(info, 4)?,
        ppid: u32::from_be(u32_at(info, 8)?),
    })
}
