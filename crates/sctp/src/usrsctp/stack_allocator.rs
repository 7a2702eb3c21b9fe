//! Memory allocator of the stack. The stack allocates and frees several small pieces per packet, and the pieces of
//! thousands of associations are scattered: the C library's `malloc` took an eighth of all time, and page table misses
//! as much again. Here a freed piece is the next one of its size to be allocated, and all pieces are in huge pages.
//! Memory of ended associations is kept for others.

use libc::{c_void, size_t};
use std::alloc::{Layout, alloc};
use std::cell::UnsafeCell;
use std::ptr::null_mut;

/// Unit of piece sizes: a cache line, bytes.
const LINE: usize = 64;
/// Length of the header before a piece, which holds its size in lines. Equal to the alignment that `malloc` guarantees.
const HEADER_LEN: usize = 16;
/// Size in lines from which pieces are allocated by the C library.
const LINES_MAX: usize = 64;
/// Number of bytes allocated from the system at a time: a huge page.
const CHUNK_LEN: usize = 2 << 20;

/// Pointer to the next free piece.
type FreePiece = *mut c_void;

struct StackAllocator {
    /// The most recently freed piece, by size.
    free: [FreePiece; LINES_MAX],
    /// Unused part of the newest chunk.
    chunk_rest: *mut u8,
    chunk_rest_len: usize,
}

struct StackAllocatorCell(UnsafeCell<StackAllocator>);
// SAFETY: used only by functions that the stack calls, which happens under the stack's lock.
unsafe impl Sync for StackAllocatorCell {}

static ARENA: StackAllocatorCell = StackAllocatorCell(UnsafeCell::new(StackAllocator::new()));

impl StackAllocator {
    const fn new() -> Self {
        Self {
            free: [null_mut(); LINES_MAX],
            chunk_rest: null_mut(),
            chunk_rest_len: 0,
        }
    }

    fn allocate(&mut self, size: usize) -> *mut c_void {
        let Some(total) = size.checked_add(HEADER_LEN) else {
            return null_mut();
        };
        let lines = total.div_ceil(LINE);
        let Some(free) = self.free.get_mut(lines) else {
            // SAFETY: `malloc` accepts any length.
            return unsafe { write_header(libc::malloc(total).cast(), LINES_MAX) };
        };
        let piece = *free;
        if piece.is_null() {
            // SAFETY: the new piece is long enough for its header.
            return unsafe { write_header(self.carve(lines * LINE), lines) };
        }
        // SAFETY: a free piece begins with the next one (`release`).
        *free = unsafe { piece.cast::<FreePiece>().read() };
        prefetch(*free);
        piece
    }

    /// # Safety
    /// `piece` is null, or was returned by [`allocate`](Self::allocate) and has not been freed since.
    unsafe fn release(&mut self, piece: *mut c_void) {
        if piece.is_null() {
            return;
        }
        // SAFETY: each piece follows its header.
        unsafe {
            let block = piece.byte_sub(HEADER_LEN);
            match self.free.get_mut(block.cast::<usize>().read()) {
                Some(free) => {
                    piece.cast::<FreePiece>().write(*free);
                    *free = piece;
                }
                None => libc::free(block),
            }
        }
    }

    /// Cuts a new piece off the chunk; null if the system has no memory.
    fn carve(&mut self, len: usize) -> *mut u8 {
        if self.chunk_rest_len < len {
            let Ok(layout) = Layout::from_size_align(CHUNK_LEN, CHUNK_LEN) else {
                return null_mut();
            };
            // SAFETY: the layout has a size.
            let chunk = unsafe { alloc(layout) };
            if chunk.is_null() {
                return null_mut();
            }
            // SAFETY: the chunk is ours. A failure is harmless, because huge pages only save time.
            unsafe { libc::madvise(chunk.cast(), CHUNK_LEN, libc::MADV_HUGEPAGE) };
            (self.chunk_rest, self.chunk_rest_len) = (chunk, CHUNK_LEN);
        }
        let piece = self.chunk_rest;
        self.chunk_rest = self.chunk_rest.wrapping_add(len);
        self.chunk_rest_len -= len;
        piece
    }
}

/// Prefetches a piece's beginning, if there is a piece. Pieces freed long ago are in no cache, and messages to peers
/// take hundreds of them in a row: waiting for each took an eighth of the time.
#[inline]
fn prefetch(piece: FreePiece) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        for at in [0, LINE] {
            // SAFETY: prefetching is a hint that accepts any address.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(piece.cast::<i8>().wrapping_add(at)) };
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = piece;
}

/// Writes the header of a piece, and returns the piece after it; null for a null pointer.
///
/// # Safety
/// `whole` is null, or long enough for the header.
unsafe fn write_header(whole: *mut u8, lines: usize) -> *mut c_void {
    if whole.is_null() {
        return null_mut();
    }
    // SAFETY: guaranteed by the caller.
    unsafe {
        whole.cast::<usize>().write(lines);
        whole.add(HEADER_LEN).cast()
    }
}

/// Replaces the library's `malloc`; the functions below replace `calloc` and `free`.
#[unsafe(no_mangle)]
pub extern "C" fn holdfast_usrsctp_malloc(size: size_t) -> *mut c_void {
    // SAFETY: the stack runs under our lock.
    unsafe { (*ARENA.0.get()).allocate(size) }
}

#[unsafe(no_mangle)]
pub extern "C" fn holdfast_usrsctp_calloc(count: size_t, size: size_t) -> *mut c_void {
    let Some(size) = count.checked_mul(size) else {
        return null_mut();
    };
    let piece = holdfast_usrsctp_malloc(size);
    if !piece.is_null() {
        // SAFETY: the piece has `size` bytes.
        unsafe { piece.cast::<u8>().write_bytes(0, size) };
    }
    piece
}

/// # Safety
/// The stack's lock is held; `piece` is null, or was returned by one of these functions and has not been freed since.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn holdfast_usrsctp_free(piece: *mut c_void) {
    // SAFETY: guaranteed by the caller.
    unsafe { (*ARENA.0.get()).release(piece) };
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    struct Allocation {
        piece: *mut u8,
        size: usize,
        mark: u8,
    }

    impl Allocation {
        fn new(arena: &mut StackAllocator, size: usize, mark: u8) -> Self {
            let piece: *mut u8 = arena.allocate(size).cast();
            assert!(!piece.is_null() && (piece as usize).is_multiple_of(HEADER_LEN));
            // SAFETY: the piece has `size` bytes.
            unsafe { piece.write_bytes(mark, size) };
            Self { piece, size, mark }
        }

        fn check_and_release(self, arena: &mut StackAllocator) {
            // SAFETY: the piece belongs to the test until the end of this function.
            unsafe {
                let bytes = std::slice::from_raw_parts(self.piece, self.size);
                assert!(bytes.iter().all(|byte| *byte == self.mark));
                arena.release(self.piece.cast());
            }
        }
    }

    proptest! {
        #[test]
        fn pieces_do_not_overlap(
            steps in proptest::collection::vec((any::<bool>(), 0usize..6000, any::<u8>()), 0..100),
        ) {
            let mut arena = StackAllocator::new();
            let mut taken = Vec::new();
            for (is_give, number, mark) in steps {
                if is_give && !taken.is_empty() {
                    let given: Allocation = taken.swap_remove(number % taken.len());
                    given.check_and_release(&mut arena);
                } else {
                    taken.push(Allocation::new(&mut arena, number, mark));
                }
            }
            taken.into_iter().for_each(|each| each.check_and_release(&mut arena));
        }
    }

    #[test]
    fn freed_piece_is_allocated_next() {
        let mut arena = StackAllocator::new();
        let (one, other) = (arena.allocate(200), arena.allocate(2000));
        // SAFETY: both pieces are the arena's.
        unsafe {
            arena.release(one);
            arena.release(other);
        }
        assert_eq!((arena.allocate(190), arena.allocate(1990)), (one, other));
        assert!(arena.allocate(usize::MAX).is_null());
        let left = arena.chunk_rest_len;
        // The end of a chunk is left unused if it is too short.
        for _ in 0..=left / 2048 {
            assert!(!arena.allocate(2000).is_null());
        }
        assert!(arena.chunk_rest_len > left);
    }

    #[test]
    fn calloc_clears_reused_memory() {
        let _stack = super::super::stack::LockedStack::lock();
        let piece = holdfast_usrsctp_malloc(300);
        // SAFETY: the pieces have that length, and are freed once.
        unsafe {
            piece.cast::<u8>().write_bytes(0xff, 300);
            holdfast_usrsctp_free(piece);
            let clear = holdfast_usrsctp_calloc(100, 3);
            assert_eq!(clear, piece);
            let bytes = std::slice::from_raw_parts(clear.cast::<u8>(), 300);
            assert!(bytes.iter().all(|byte| *byte == 0));
            holdfast_usrsctp_free(clear);
            holdfast_usrsctp_free(null_mut());
        }
        assert!(holdfast_usrsctp_calloc(usize::MAX, 2).is_null());
    }
}
