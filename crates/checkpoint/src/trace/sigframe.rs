//! Signal frame from which `rt_sigreturn` restores a thread (`struct ucontext` of x86_64).

use super::Registers;

/// `UC_FP_XSTATE | UC_SIGCONTEXT_SS | UC_STRICT_RESTORE_SS`.
const CONTEXT_FLAGS: u64 = 7;
/// Alternate stack flags that the kernel rejects, so that the alternate stack is left unchanged.
const INVALID_STACK_FLAGS: u64 = 0xffff;
const FP_XSTATE_MAGIC1: u32 = 0x4650_5853;
const FP_XSTATE_MAGIC2: u32 = 0x4650_5845;
/// Bytes of `ucontext` up to and including the signal mask.
const CONTEXT_BYTES: usize = 40 + 256 + 8;
/// Offset of `struct _fpx_sw_bytes` in the FXSAVE area. Ptrace stores the features there.
const SOFTWARE_OFFSET: usize = 464;

/// Returns the size in bytes of a frame with `extended` bytes of vector registers.
pub(crate) fn frame_bytes(extended: usize) -> usize {
    CONTEXT_BYTES.next_multiple_of(64) + extended + size_of_val(&FP_XSTATE_MAGIC2)
}

/// Builds a frame for address `at`, which must be a multiple of 64. `extended` has the format of ptrace; empty
/// resets these registers.
pub(crate) fn build_sigframe(
    at: u64,
    registers: &Registers,
    extended: &[u8],
    mask: u64,
) -> Vec<u8> {
    let extended_at = CONTEXT_BYTES.next_multiple_of(64);
    let mut frame = Vec::with_capacity(extended_at + extended.len() + 4);
    let r = registers;
    let words = [
        CONTEXT_FLAGS,
        0,
        0,
        INVALID_STACK_FLAGS,
        0, // flags, link, alternate stack (address, flags, size)
        r.r8,
        r.r9,
        r.r10,
        r.r11,
        r.r12,
        r.r13,
        r.r14,
        r.r15,
        r.rdi,
        r.rsi,
        r.rbp,
        r.rbx,
        r.rdx,
        r.rax,
        r.rcx,
        r.rsp,
        r.rip,
        r.eflags,
        (r.cs & 0xffff) | (r.ss & 0xffff) << 48, // cs, gs, fs, ss
        0,
        0,
        0,
        0, // err, trapno, oldmask, cr2
        if extended.is_empty() {
            0
        } else {
            at + extended_at as u64
        },
    ];
    frame.extend(words.iter().flat_map(|word| word.to_ne_bytes()));
    frame.extend([0; 64]);
    frame.extend(mask.to_ne_bytes());
    frame.resize(extended_at, 0);
    frame.extend_from_slice(extended);
    if extended.len() > 512 {
        let software = extended_at + SOFTWARE_OFFSET;
        let features: [u8; 8] = extended[SOFTWARE_OFFSET..SOFTWARE_OFFSET + 8]
            .try_into()
            .unwrap_or([0; 8]);
        let size = extended.len() as u32;
        frame[software..software + 4].copy_from_slice(&FP_XSTATE_MAGIC1.to_ne_bytes());
        frame[software + 4..software + 8].copy_from_slice(&(size + 4).to_ne_bytes());
        frame[software + 8..software + 16].copy_from_slice(&features);
        frame[software + 16..software + 20].copy_from_slice(&size.to_ne_bytes());
        frame.extend(FP_XSTATE_MAGIC2.to_ne_bytes());
    }
    frame
}
