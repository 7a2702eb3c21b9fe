//! Delivery of the stack's messages and notifications to one endpoint.

use super::ffi::{self, RcvInfo, SockStore, Socket};
use super::stack::STACK_STATE;
use super::stack_allocator::holdfast_usrsctp_free;
use crate::event::AssocId;
use crate::event_assembler::{EventAssembler, MessageInfo, SctpStackConstants};
use libc::{c_int, c_void, size_t};
use std::os::fd::OwnedFd;

/// Notifications and flags of `usrsctp.h`.
const STACK_CONSTANTS: SctpStackConstants = SctpStackConstants {
    assoc_change: 1,
    path_change: 2,
    send_failed: 14,
    first_state: 1,
    unordered: ffi::UNORDERED,
    data_sent: 2,
};
/// Notifications that endpoints subscribe to.
pub const NOTIFICATIONS: [u16; 3] = [
    STACK_CONSTANTS.assoc_change,
    STACK_CONSTANTS.path_change,
    STACK_CONSTANTS.send_failed,
];

/// Events of an endpoint, and its wake-up.
pub struct EndpointQueue {
    pub assembler: EventAssembler,
    /// Event descriptor, readable when another endpoint's call has added events.
    pub wake: OwnedFd,
}

impl EndpointQueue {
    pub fn new(wake: OwnedFd, message_len_max: u32) -> Self {
        Self {
            assembler: EventAssembler::new(STACK_CONSTANTS, message_len_max),
            wake,
        }
    }
}

/// Returns the stack's user argument of a socket: its port's number within the endpoint, and its queue's number.
pub fn ulp_info(port: u32, queue: u32) -> *mut c_void {
    (u64::from(port) << 32 | u64::from(queue)) as *mut c_void
}

/// Receive callback of the stack.
pub unsafe extern "C" fn on_received(
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
    let inner = unsafe { STACK_STATE.assume_locked() };
    // SAFETY: the stack gives `length` readable bytes.
    let bytes = unsafe { std::slice::from_raw_parts(data.cast::<u8>(), length) };
    let mut queues = inner.queues.borrow_mut();
    let (port, queue) = ((ulp_info as u64 >> 32) as u32, ulp_info as u32);
    if let Some(Some(queue)) = queues.get_mut(queue as usize) {
        if flags & ffi::MSG_NOTIFICATION != 0 {
            queue.assembler.on_notification(port, bytes);
        } else {
            let message_info = MessageInfo {
                assoc: AssocId::new(port, info.assoc),
                stream: info.sid,
                flags: info.flags,
                ppid: u32::from_be(info.ppid),
            };
            let is_end = flags & libc::MSG_EOR != 0;
            queue.assembler.add_message(bytes, &message_info, is_end);
        }
    }
    // SAFETY: the stack allocated the buffer, the callback owns it, and the lock is held.
    unsafe { holdfast_usrsctp_free(data) };
    1
}
