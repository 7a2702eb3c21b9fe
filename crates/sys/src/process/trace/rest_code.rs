//! Machine code that makes the rest of a system call in a program, adds up the result, and returns to the program.
//!
//! The code needs no tracer: it works from a page of data behind it, and a thread that is interrupted in it, moved, or sent a
//! signal goes on in it like anywhere else in its program.

use super::Registers;
use super::registers::NO_CALL;

/// Bytes of the page of code. The data follow it.
pub(crate) const CODE_BYTES: u64 = 0x1000;
/// Bytes of the data: the fields below, and as many parts of a vector as a call may have.
pub(crate) const DATA_BYTES: u64 = 0x5000;
/// Where in the data structures lie that the call reads.
pub(crate) const STRUCTURES: u64 = 0x100;
/// Bytes of the instruction `syscall`, with which the code begins.
const CALL_LENGTH: u64 = 2;
/// First word of the data.
const MAGIC: u64 = 0x6c6c_6163_7473_6572;
/// Words of the data that have a meaning.
const WORDS: usize = 14;

std::arch::global_asm!(
    ".pushsection .rodata",
    ".global holdfast_rest_begin, holdfast_rest_end",
    "holdfast_rest_begin:",
    ".Lholdfast_rest:",
    "syscall",
    // What interrupted `recvmmsg` is an error of its socket, which the next call is told.
    "cmp rax, -512",
    "jne 1f",
    "mov rax, [rip + .Lholdfast_rest + 0x1000 + 104]",
    "jmp .Lholdfast_rest",
    // An error ends the call with what was done before, if anything was.
    "1: mov rcx, [rip + .Lholdfast_rest + 0x1000 + 16]",
    "test rax, rax",
    "jns 2f",
    "test rcx, rcx",
    "jz 3f",
    "xor eax, eax",
    "2: add rax, rcx",
    // A vector that the program told in memory of its own.
    "3: mov rcx, [rip + .Lholdfast_rest + 0x1000 + 80]",
    "test rcx, rcx",
    "jz 4f",
    "mov r11, [rip + .Lholdfast_rest + 0x1000 + 88]",
    "mov [rcx], r11",
    "mov r11, [rip + .Lholdfast_rest + 0x1000 + 96]",
    "mov [rcx + 8], r11",
    "4: mov rdi, [rip + .Lholdfast_rest + 0x1000 + 24]",
    "mov rsi, [rip + .Lholdfast_rest + 0x1000 + 32]",
    "mov rdx, [rip + .Lholdfast_rest + 0x1000 + 40]",
    "mov r10, [rip + .Lholdfast_rest + 0x1000 + 48]",
    "mov r8, [rip + .Lholdfast_rest + 0x1000 + 56]",
    "mov r9, [rip + .Lholdfast_rest + 0x1000 + 64]",
    "mov rcx, [rip + .Lholdfast_rest + 0x1000 + 72]",
    "mov qword ptr [rip + .Lholdfast_rest + 0x1000 + 8], 0",
    // The kernel leaves the same in `rcx`.
    "jmp rcx",
    "holdfast_rest_end:",
    ".popsection",
);

unsafe extern "C" {
    static holdfast_rest_begin: u8;
    static holdfast_rest_end: u8;
}

/// The code, to be written to the first address of its page.
pub(crate) fn code() -> &'static [u8] {
    let begin = &raw const holdfast_rest_begin;
    let length = (&raw const holdfast_rest_end).addr() - begin.addr();
    // SAFETY: both labels are in the same read-only section above, the second behind the first.
    unsafe { std::slice::from_raw_parts(begin, length) }
}

/// The fixed part of the data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct RestData {
    /// A thread is to return through the code.
    pub busy: bool,
    /// What the call has returned so far.
    pub done: u64,
    /// The program's arguments: `rdi`, `rsi`, `rdx`, `r10`, `r8`, `r9`.
    pub arguments: [u64; 6],
    /// Where the program goes on.
    pub target: u64,
    /// Address of two words of the program's that were changed for the call, or 0, and these words.
    pub changed: (u64, [u64; 2]),
    /// The call's number.
    pub number: u64,
}

impl RestData {
    pub const BYTES: usize = WORDS * 8;

    /// None where something else lies.
    pub fn parse(bytes: &[u8; Self::BYTES]) -> Option<Self> {
        let mut words = [0; WORDS];
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
            busy: busy != 0,
            done,
            arguments: [a, b, c, d, e, f],
            target,
            changed: (place, [one, two]),
            number,
        })
    }

    pub fn encode(&self) -> Vec<u8> {
        let (place, words) = self.changed;
        let head = [MAGIC, u64::from(self.busy), self.done];
        let tail = [self.target, place];
        let all = head.iter().chain(&self.arguments).chain(&tail);
        all.chain(&words)
            .chain(&[self.number])
            .flat_map(|word| word.to_ne_bytes())
            .collect()
    }
}

impl Registers {
    /// Arguments of a system call.
    pub(crate) fn arguments(&self) -> [u64; 6] {
        [self.rdi, self.rsi, self.rdx, self.r10, self.r8, self.r9]
    }

    /// The thread about to make call `number` with these arguments by the code at `base`.
    pub(crate) fn at_rest(&self, base: u64, number: u64, arguments: [u64; 6]) -> Self {
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

    /// The thread of [`Registers::at_rest`] behind a call that did nothing more.
    pub(crate) fn without_rest(&self) -> Self {
        Self {
            rip: self.rip + CALL_LENGTH,
            rax: 0,
            orig_rax: NO_CALL,
            ..*self
        }
    }

    /// Where the code would begin by which the thread has made its call.
    pub(crate) fn code_begin(&self) -> u64 {
        self.rip.wrapping_sub(CALL_LENGTH)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn data_are_read_as_they_were_written() {
        let data = RestData {
            busy: true,
            done: 1,
            arguments: [2, 3, 4, 5, 6, 7],
            target: 8,
            changed: (9, [10, 11]),
            number: 12,
        };
        let bytes = data.encode();
        assert_eq!(RestData::parse(bytes[..].try_into().unwrap()), Some(data));
        assert_eq!(RestData::parse(&[0; RestData::BYTES]), None);
    }
}
