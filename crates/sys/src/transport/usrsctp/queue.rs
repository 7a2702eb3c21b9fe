//! Delivery of the stack's messages and notifications to one endpoint.

use super::ffi::{self, RcvInfo, SockStore, Socket};
use super::memory::holdfast_usrsctp_free;
use super::stack::INNER;
use crate::transport::assembly::{Assembly, Dialect, Origin};
use crate::transport::event::AssocId;
use libc::{c_int, c_void, size_t};
use std::os::fd::OwnedFd;

/// Notifications and flags of `usrsctp.h`.
const DIALECT: Dialect = Dialect {
    assoc_change: 1,
    path_change: 2,
    send_failed: 14,
    first_state: 1,
    unordered: ffi::UNORDERED,
    data_sent: 2,
};
/// Notifications that endpoints subscribe to.
pub const NOTICES: [u16; 3] = [
    DIALECT.assoc_change,
    DIALECT.path_change,
    DIALECT.send_failed,
];

/// Events of an endpoint, and its wake-up.
pub struct Queue {
    pub assembly: Assembly,
    /// Event descriptor, readable when another endpoint's call has added events.
    pub wake: OwnedFd,
}

impl Queue {
    pub fn new(wake: OwnedFd, message_len_max: u32) -> Self {
        Self {
            assembly: Assembly::new(DIALECT, message_len_max),
            wake,
        }
    }
}

/// Returns the stack's user argument of a socket: its port's number within the endpoint, and its queue's number.
pub fn ulp_info(port: u32, queue: u32) -> *mut c_void {
    (u64::from(port) << 32 | u64::from(queue)) as *mut c_void
}

/// Receive callback of the stack.
pub unsafe extern "C" fn receive(
    _socket: *mut Socket,
    _address: SockStore,
    data: *mut c_void,
    length: size_t,
    info: RcvInfo,
    flags: c_int,
    ulp_info: *mut c_void,
) -> c_int {
    if data.is_null() {
        return 1;
    }
    // SAFETY: the stack calls back only inside our calls, under the lock.
    let inner = unsafe { INNER.assume_locked() };
    // SAFETY: the stack gives `length` readable bytes.
    let bytes = unsafe { std::slice::from_raw_parts(data.cast::<u8>(), length) };
    let mut queues = inner.queues.borrow_mut();
    let (port, queue) = ((ulp_info as u64 >> 32) as u32, ulp_info as u32);
    if let Some(Some(queue)) = queues.get_mut(queue as usize) {
        if flags & ffi::MSG_NOTIFICATION != 0 {
            queue.assembly.notice(port, bytes);
        } else {
            let origin = Origin {
                assoc: AssocId::new(port, info.assoc),
                stream: info.sid,
                flags: info.flags,
                ppid: u32::from_be(info.ppid),
            };
            let is_end = flags & libc::MSG_EOR != 0;
            queue.assembly.message(bytes, &origin, is_end);
        }
    }
    // SAFETY: the stack allocated the buffer, the callback owns it, and the lock is held.
    unsafe { holdfast_usrsctp_free(data) };
    1
}
