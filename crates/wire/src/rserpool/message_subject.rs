//! The pool and element of an undecoded ASAP or ENRP message: enough to prefetch the memory that its handler reads.

use super::identifiers::ElementId;
use super::parameter;

/// The first pool and element in an ASAP or ENRP message. The message may still be malformed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PoolMessageSubject<'a> {
    /// The pool's handle.
    pub handle: &'a [u8],
    /// The element's number; none in a handle resolution.
    pub id: Option<ElementId>,
    /// True if the element leaves its pool.
    pub is_removal: bool,
}

/// Returns the subject of an ASAP message to a registrar.
#[inline]
pub fn asap_subject(message: &[u8]) -> Option<PoolMessageSubject<'_>> {
    match message.first()? {
        // Registration, deregistration, answer to a keep-alive, unreachable report.
        &kind @ (0x01 | 0x02 | 0x08 | 0x09) => parse_element(message.get(4..)?, kind == 0x02),
        // Resolution.
        0x05 => {
            let (handle, _) = parse_handle(message.get(4..)?)?;
            Some(PoolMessageSubject {
                handle,
                id: None,
                is_removal: false,
            })
        }
        _ => None,
    }
}

/// Returns the subject of an ENRP handle update.
#[inline]
pub fn enrp_subject(message: &[u8]) -> Option<PoolMessageSubject<'_>> {
    // After the header: both registrars, and the action.
    if message.first()? != &0x04 {
        return None;
    }
    let adds = message.get(12..14)? == [0, 0];
    parse_element(message.get(16..)?, !adds)
}

/// Reads a handle, then an element's number, or an element, which begins with its number.
#[inline]
fn parse_element(parameters: &[u8], is_removal: bool) -> Option<PoolMessageSubject<'_>> {
    let (handle, rest) = parse_handle(parameters)?;
    let id = rest.get(4..)?.first_chunk()?;
    Some(PoolMessageSubject {
        handle,
        id: Some(ElementId(u32::from_be_bytes(*id))),
        is_removal,
    })
}

/// Reads a pool handle parameter; returns the handle and the bytes after it.
#[inline]
fn parse_handle(parameters: &[u8]) -> Option<(&[u8], &[u8])> {
    let &[t0, t1, l0, l1] = parameters.first_chunk()?;
    let length = usize::from(u16::from_be_bytes([l0, l1]));
    if u16::from_be_bytes([t0, t1]) != parameter::POOL_HANDLE {
        return None;
    }
    let rest = parameters.get(length.next_multiple_of(4)..);
    Some((parameters.get(4..length)?, rest.unwrap_or_default()))
}
