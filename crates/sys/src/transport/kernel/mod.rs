//! SCTP by the kernel.
pub fn is_there() -> bool { false }
