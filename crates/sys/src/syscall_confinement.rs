//! Confinement of a daemon that starts no programs: it gives up new privileges, and the system calls by which
//! processes, mounts, keys or the kernel itself could be changed.
//!
//! Children inherit both restrictions for ever, so an ancestor of restored processes must not use them.

use std::io;

use crate::sockopt::check;

/// System calls that fail with `EPERM`.
const DENIED_SYSCALLS: &[libc::c_long] = &[
    // Programs, and other processes.
    libc::SYS_execve,
    libc::SYS_execveat,
    libc::SYS_ptrace,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_pidfd_getfd,
    libc::SYS_kcmp,
    libc::SYS_personality,
    // The kernel.
    libc::SYS_bpf,
    libc::SYS_perf_event_open,
    libc::SYS_userfaultfd,
    libc::SYS_io_uring_setup,
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
    libc::SYS_init_module,
    libc::SYS_finit_module,
    libc::SYS_delete_module,
    libc::SYS_kexec_load,
    libc::SYS_reboot,
    libc::SYS_syslog,
    // Namespaces, mounts and files by handle.
    libc::SYS_unshare,
    libc::SYS_setns,
    libc::SYS_chroot,
    libc::SYS_pivot_root,
    libc::SYS_mount,
    libc::SYS_umount2,
    libc::SYS_move_mount,
    libc::SYS_open_tree,
    libc::SYS_fsopen,
    libc::SYS_fsconfig,
    libc::SYS_fsmount,
    libc::SYS_fspick,
    libc::SYS_open_by_handle_at,
    libc::SYS_swapon,
    libc::SYS_swapoff,
    libc::SYS_quotactl,
    libc::SYS_acct,
    // Keys, clocks and names.
    libc::SYS_add_key,
    libc::SYS_request_key,
    libc::SYS_keyctl,
    libc::SYS_clock_settime,
    libc::SYS_settimeofday,
    libc::SYS_sethostname,
    libc::SYS_setdomainname,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_iopl,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_ioperm,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_modify_ldt,
];

/// `AUDIT_ARCH_` of this build.
#[cfg(target_arch = "x86_64")]
const AUDIT_ARCH: Option<u32> = Some(0xc000_003e);
#[cfg(target_arch = "aarch64")]
const AUDIT_ARCH: Option<u32> = Some(0xc000_00b7);
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
const AUDIT_ARCH: Option<u32> = None;

/// First system call number of the x32 interface, which no Holdfast program uses.
const X32_SYSCALL_BIT: u32 = 0x4000_0000;

/// Offsets in `struct seccomp_data`.
const NUMBER_OFFSET: u32 = 0;
const ARCH_OFFSET: u32 = 4;

/// Classic BPF (`linux/bpf_common.h`): load a word, jump if equal, jump if at least, return.
const LOAD: u16 = 0x20;
const IF_EQUAL: u16 = 0x15;
const IF_AT_LEAST: u16 = 0x35;
const RETURN: u16 = 0x06;

/// Gives up new privileges and the system calls in `DENIED_SYSCALLS`, for all threads of the process and their children.
///
/// Returns false if the kernel has no system call filters (`CONFIG_SECCOMP_FILTER`).
///
/// # Errors
/// Errors of `prctl(2)` and `seccomp(2)`.
pub fn confine() -> io::Result<bool> {
    match install_filter(libc::SECCOMP_FILTER_FLAG_TSYNC as libc::c_ulong) {
        Err(error) if matches!(error.raw_os_error(), Some(libc::ENOSYS | libc::EINVAL)) => {
            Ok(false)
        }
        outcome => outcome.map(|()| true),
    }
}

fn install_filter(flags: libc::c_ulong) -> io::Result<()> {
    // SAFETY: no pointers are passed.
    check(unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) })?;
    let mut filter = build_filter();
    let program = libc::sock_fprog {
        len: u16::try_from(filter.len()).expect("a short program"),
        filter: filter.as_mut_ptr(),
    };
    // SAFETY: the program and its instructions are read during the call alone.
    let outcome = unsafe {
        libc::syscall(
            libc::SYS_seccomp,
            libc::c_ulong::from(libc::SECCOMP_SET_MODE_FILTER),
            flags,
            &raw const program,
        )
    };
    match outcome {
        0 => Ok(()),
        // A positive result is the ID of the thread that could not be synchronized.
        1.. => Err(io::Error::other(format!(
            "thread {outcome} has a different seccomp filter"
        ))),
        _ => Err(io::Error::last_os_error()),
    }
}

fn build_filter() -> Vec<libc::sock_filter> {
    let instruction = |code, k, jt, jf| libc::sock_filter { code, jt, jf, k };
    let deny = libc::SECCOMP_RET_ERRNO | libc::EPERM.cast_unsigned();
    let mut program = Vec::new();
    if let Some(architecture) = AUDIT_ARCH {
        program.extend([
            instruction(LOAD, ARCH_OFFSET, 0, 0),
            instruction(IF_EQUAL, architecture, 1, 0),
            instruction(RETURN, libc::SECCOMP_RET_KILL_PROCESS, 0, 0),
        ]);
    }
    program.extend([
        instruction(LOAD, NUMBER_OFFSET, 0, 0),
        instruction(IF_AT_LEAST, X32_SYSCALL_BIT, 0, 1),
        instruction(RETURN, deny, 0, 0),
    ]);
    for number in DENIED_SYSCALLS {
        let number = u32::try_from(*number).expect("a number of a system call");
        program.extend([
            instruction(IF_EQUAL, number, 0, 1),
            instruction(RETURN, deny, 0, 0),
        ]);
    }
    program.push(instruction(RETURN, libc::SECCOMP_RET_ALLOW, 0, 0));
    program
}
