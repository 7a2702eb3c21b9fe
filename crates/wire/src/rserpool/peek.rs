//! What a message is about, before it is read: enough to fetch from memory what will be asked for.

use super::id::ElementId;
use super::parameter;

/// The pool and the element that a message names first. The message may still be malformed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Subject<'a> {
    /// The pool's handle.
    pub handle: &'a [u8],
    /// The element's number; none in a handle resolution.
    pub id: Option<ElementId>,
    /// It leaves its pool.
    pub leaves: bool,
}

/// That of an ASAP message for a registrar.
#[inline]
pub fn asap(message: &[u8]) -> Option<Subject<'_>> {
    match message.first()? {
        // Registration and deregistration, a keep-alive's answer, a report.
        &kind @ (0x01 | 0x02 | 0x08 | 0x09) => element(message.get(4..)?, kind == 0x02),
        // Resolution.
        0x05 => {
            let (handle, _) = handle(message.get(4..)?)?;
            Some(Subject {
                handle,
                id: None,
                leaves: false,
            })
        }
        _ => None,
    }
}

/// That of an ENRP handle update.
#[inline]
pub fn enrp(message: &[u8]) -> Option<Subject<'_>> {
    // Behind the header: both registrars, and the action.
    if message.first()? != &0x04 {
        return None;
    }
    let adds = message.get(12..14)? == [0, 0];
    element(message.get(16..)?, !adds)
}

/// A handle, and an element's number or the element, which begins with it.
#[inline]
fn element(parameters: &[u8], leaves: bool) -> Option<Subject<'_>> {
    let (handle, rest) = handle(parameters)?;
    let id = rest.get(4..)?.first_chunk()?;
    Some(Subject {
        handle,
        id: Some(ElementId(u32::from_be_bytes(*id))),
        leaves,
    })
}

/// A pool handle parameter, and what is behind it.
#[inline]
fn handle(parameters: &[u8]) -> Option<(&[u8], &[u8])> {
    let &[t0, t1, l0, l1] = parameters.first_chunk()?;
    let length = usize::from(u16::from_be_bytes([l0, l1]));
    if u16::from_be_bytes([t0, t1]) != parameter::POOL_HANDLE {
        return None;
    }
    let rest = parameters.get(length.next_multiple_of(4)..);
    Some((parameters.get(4..length)?, rest.unwrap_or_default()))
}
