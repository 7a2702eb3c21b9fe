//! Machine code that makes the rest of a system call in a program, adds up the result, and returns to the program.
//!
//! The code needs no tracer: its data are in the page behind it. A thread that is interrupted in the code, migrated,
//! or sent a signal continues in it as in any other code of the program.

use super::Registers;
use super::registers::NO_CALL;

/// Size of the code page in bytes. The data follow it.
pub(crate) const CODE_BYTES: u64 = 0x1000;
/// Size of the data in bytes: the fields below, and as many vector elements as a call may have.
pub(crate) const DATA_BYTES: u64 = 0x5000;
/// Offset in the data of the structures that the call reads.
pub(crate) const STRUCTURES_OFFSET: u64 = 0x100;
/// Size in bytes of the instruction `syscall`, with which the code begins.
const SYSCALL_BYTES: u64 = 2;
/// First word of the data.
const MAGIC: u64 = 0x6c6c_6163_7473_6572;
/// Number of data words in use.
const DATA_WORDS: usize = 14;

std::arch::global_asm!(
    ".pushsection .rodata",
    ".global holdfast_continuation_begin, holdfast_continuation_end",
    "holdfast_continuation_begin:",
    ".Lholdfast_continuation:",
    "syscall",
    // An interrupted `recvmmsg` stores -512 (ERESTARTSYS) as the socket's error, and the next call returns it: call
    // again.
    "cmp rax, -512",
    "jne 1f",
    "mov rax, [rip + .Lholdfast_continuation + 0x1000 + 104]",
    "jmp .Lholdfast_continuation",
    // An error ends the call with the earlier partial result, if there is one.
    "1: mov rcx, [rip + .Lholdfast_continuation + 0x1000 + 16]",
    "test rax, rax",
    "jns 2f",
    "test rcx, rcx",
    "jz 3f",
    "xor eax, eax",
    "2: add rax, rcx",
    // Restore the address and length of the vector in the program's own header.
    "3: mov rcx, [rip + .Lholdfast_continuation + 0x1000 + 80]",
    "test rcx, rcx",
    "jz 4f",
    "mov r11, [rip + .Lholdfast_continuation + 0x1000 + 88]",
    "mov [rcx], r11",
    "mov r11, [rip + .Lholdfast_continuation + 0x1000 + 96]",
    "mov [rcx + 8], r11",
    "4: mov rdi, [rip + .Lholdfast_continuation + 0x1000 + 24]",
    "mov rsi, [rip + .Lholdfast_continuation + 0x1000 + 32]",
    "mov rdx, [rip + .Lholdfast_continuation + 0x1000 + 40]",
    "mov r10, [rip + .Lholdfast_continuation + 0x1000 + 48]",
    "mov r8, [rip + .Lholdfast_continuation + 0x1000 + 56]",
    "mov r9, [rip + .Lholdfast_continuation + 0x1000 + 64]",
    "mov rcx, [rip + .Lholdfast_continuation + 0x1000 + 72]",
    "mov qword ptr [rip + .Lholdfast_continuation + 0x1000 + 8], 0",
    // The kernel also leaves the return address in `rcx`.
    "jmp rcx",
    "holdfast_continuation_end:",
    ".popsection",
);

unsafe extern "C" {
    static holdfast_continuation_begin: u8;
    static holdfast_continuation_end: u8;
}

/// Returns the code, to be written to the first address of its page.
pub(crate) fn code() -> &'static [u8] {
    let begin = &raw const holdfast_continuation_begin;
    let length = (&raw const holdfast_continuation_end).addr() - begin.addr();
    // SAFETY: both labels are in the same read-only section above, the second behind the first.
    unsafe { std::slice::from_raw_parts(begin, length) }
}

/// The fixed part of the data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ContinuationData {
    /// True while a thread has to return through the code.
    pub is_busy: bool,
    /// Result of the call so far.
    pub result_so_far: u64,
    /// The program's arguments: `rdi`, `rsi`, `rdx`, `r10`, `r8`, `r9`.
    pub arguments: [u64; 6],
    /// Address at which the program continues.
    pub return_address: u64,
    /// Address of two words in the program's memory that were changed for the call, or 0, and their original values.
    pub changed_words: (u64, [u64; 2]),
    /// The call's number.
    pub call_number: u64,
}

impl ContinuationData {
    pub const BYTES: usize = DATA_WORDS * 8;

    /// Parses the data; `None` if other data are there.
    pub fn parse(bytes: &[u8; Self::BYTES]) -> Option<Self> {
        let mut words = [0; DATA_WORDS];
        for (word, bytes) in words.iter_mut().zip(bytes.as_chunks::<8>().0) {
            *word = u64::from_ne_bytes(*bytes);
        }
        let [
            magic,
            busy,
            done,
            a,
            b,
            c,
            d,
            e,
            f,
            target,
            place,
            one,
            two,
            number,
        ] = words;
        (magic == MAGIC).then_some(Self {
            is_busy: busy != 0,
            result_so_far: done,
            arguments: [a, b, c, d, e, f],
            return_address: target,
            changed_words: (place, [one, two]),
            call_number: number,
        })
    }

    pub fn encode(&self) -> Vec<u8> {
        let (address, words) = self.changed_words;
        let head = [MAGIC, u64::from(self.is_busy), self.result_so_far];
        let tail = [self.return_address, address];
        let all = head.iter().chain(&self.arguments).chain(&tail);
        all.chain(&words)
            .chain(&[self.call_number])
            .flat_map(|word| word.to_ne_bytes())
            .collect()
    }
}

impl Registers {
    /// Returns the arguments of a system call.
    pub(crate) fn arguments(&self) -> [u64; 6] {
        [self.rdi, self.rsi, self.rdx, self.r10, self.r8, self.r9]
    }

    /// Returns the registers of a thread about to make call `number` with these arguments by the code at `base`.
    pub(crate) fn at_continuation(&self, base: u64, number: u64, arguments: [u64; 6]) -> Self {
        let [rdi, rsi, rdx, r10, r8, r9] = arguments;
        Self {
            rip: base,
            rax: number,
            orig_rax: NO_CALL,
            rdi,
            rsi,
            rdx,
            r10,
            r8,
            r9,
            ..*self
        }
    }

    /// Returns the registers of a thread of [`Registers::at_continuation`] behind a call that transferred nothing more.
    pub(crate) fn after_continuation(&self) -> Self {
        Self {
            rip: self.rip + SYSCALL_BYTES,
            rax: 0,
            orig_rax: NO_CALL,
            ..*self
        }
    }

    /// Returns the address at which the code would begin if the thread made its call in the code.
    pub(crate) fn continuation_start(&self) -> u64 {
        self.rip.wrapping_sub(SYSCALL_BYTES)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn encoded_data_are_parsed() {
        let data = ContinuationData {
            is_busy: true,
            result_so_far: 1,
            arguments: [2, 3, 4, 5, 6, 7],
            return_address: 8,
            changed_words: (9, [10, 11]),
            call_number: 12,
        };
        let bytes = data.encode();
        assert_eq!(
            ContinuationData::parse(bytes[..].try_into().unwrap()),
            Some(data)
        );
        assert_eq!(ContinuationData::parse(&[0; ContinuationData::BYTES]), None);
    }
}
