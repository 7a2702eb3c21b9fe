//! The stack's hash tables. The library keeps an endpoint's associations by ID in 32 buckets, regardless of their
//! count: at 2,000 associations each sent message walked a list of dozens. The function that makes the tables is
//! replaced, and enlarges that one.

use super::stack_allocator::holdfast_usrsctp_calloc;
use libc::{c_int, c_ulong, c_void};
use std::sync::atomic::{AtomicI32, Ordering};

/// Size that the stack requests for that table only (`SCTP_STACK_VTAG_HASH_SIZE`).
const VTAG_TABLE_DEFAULT: c_int = 32;
/// Size of the table for an endpoint with many associations.
const VTAG_TABLE_LARGE: c_int = 4096;

static VTAG_TABLE_SIZE: AtomicI32 = AtomicI32::new(VTAG_TABLE_DEFAULT);

/// Sets whether sockets opened from then on have many associations.
pub fn set_many_associations(many: bool) {
    VTAG_TABLE_SIZE.store(
        if many {
            VTAG_TABLE_LARGE
        } else {
            VTAG_TABLE_DEFAULT
        },
        Ordering::Relaxed,
    );
}

/// Returns the number of buckets for a number of elements: the largest power of two not above it.
fn buckets(elements: c_int) -> usize {
    let elements = match elements {
        VTAG_TABLE_DEFAULT => VTAG_TABLE_SIZE.load(Ordering::Relaxed),
        other => other.max(1),
    };
    1 << elements.ilog2()
}

/// Replaces the library's function of this name: makes a table of empty lists, each one pointer.
#[unsafe(no_mangle)]
unsafe extern "C" fn sctp_hashinit_flags(
    elements: c_int,
    _kind: *mut c_void,
    mask: *mut c_ulong,
    _flags: c_int,
) -> *mut c_void {
    let buckets = buckets(elements);
    // SAFETY: the stack passes a valid pointer to the mask.
    unsafe { *mask = buckets as c_ulong - 1 };
    // The stack checks the table for null, and frees it.
    holdfast_usrsctp_calloc(buckets, size_of::<*mut c_void>())
}

#[cfg(test)]
mod tests {
    use super::super::stack_allocator::holdfast_usrsctp_free;
    use super::*;

    #[test]
    fn table_size_is_rounded_down_to_power_of_two() {
        assert_eq!(buckets(1), 1);
        assert_eq!(buckets(4095), 2048);
        assert_eq!(buckets(4096), 4096);
        assert_eq!(buckets(0), 1);
        let mut mask = 0;
        let _stack = super::super::stack::LockedStack::lock();
        // SAFETY: `mask` is a valid pointer; the table is freed once.
        unsafe {
            let table = sctp_hashinit_flags(8, std::ptr::null_mut(), &raw mut mask, 0);
            assert_eq!(mask, 7);
            assert!(!table.is_null());
            holdfast_usrsctp_free(table);
        }
    }
}
