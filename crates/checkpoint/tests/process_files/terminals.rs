//! Pseudo-terminals. The acceptor has its own devpts, so that terminal numbers are free.

use crate::harness::{Donor, borrow_fd, put_at, read_available, stop_self};
use rustix::fs::{Mode, OFlags, open};
use rustix::io::write;
use rustix::pty::{OpenptFlags, openpt, ptsname, unlockpt};
use rustix::termios::{LocalModes, OptionalActions, Winsize, tcgetattr, tcgetwinsize};
use rustix::termios::{tcsetattr, tcsetwinsize};
use std::process::Command;

/// Mounts a separate devpts for the calling process.
fn mount_own_devpts() {
    // SAFETY: the process has one thread.
    assert_eq!(unsafe { libc::unshare(libc::CLONE_NEWNS) }, 0);
    let run = |arguments: &[&str]| {
        let status = Command::new("mount")
            .args(arguments)
            .status()
            .expect("mount");
        assert!(status.success(), "mount {arguments:?}");
    };
    run(&["--make-rprivate", "/"]);
    run(&[
        "-t",
        "devpts",
        "-o",
        "newinstance,ptmxmode=666",
        "devpts",
        "/dev/pts",
    ]);
}

#[test]
fn terminal_keeps_number_modes_and_size() {
    let donor = Donor::new(|| {
        // Opens another terminal first, so that the tested terminal does not have the first number.
        let other = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).expect("a terminal");
        put_at(
            openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).expect("a terminal"),
            10,
        );
        drop(other);
        unlockpt(borrow_fd(10)).expect("unlocked");
        let name = ptsname(borrow_fd(10), Vec::new()).expect("name");
        put_at(
            open(name, OFlags::RDWR | OFlags::NOCTTY, Mode::empty()).expect("open"),
            11,
        );
        let mut modes = tcgetattr(borrow_fd(11)).expect("modes");
        modes
            .local_modes
            .remove(LocalModes::ECHO | LocalModes::ICANON);
        tcsetattr(borrow_fd(11), OptionalActions::Now, &modes).expect("modes");
        let size = Winsize {
            ws_row: 33,
            ws_col: 99,
            ws_xpixel: 1,
            ws_ypixel: 2,
        };
        tcsetwinsize(borrow_fd(10), size).expect("size");
        stop_self();
    });
    let name = std::fs::read_link(format!("/proc/{}/fd/11", donor.pids()[0])).expect("link");
    donor
        .save_unchanged()
        .restore_in_and_check(mount_own_devpts, |_| {
            assert_eq!(std::fs::read_link("/proc/self/fd/11").expect("link"), name);
            let modes = tcgetattr(borrow_fd(11)).expect("modes").local_modes;
            assert!(!modes.intersects(LocalModes::ECHO | LocalModes::ICANON));
            assert!(modes.contains(LocalModes::ISIG));
            let size = tcgetwinsize(borrow_fd(11)).expect("size");
            assert_eq!((size.ws_row, size.ws_col, size.ws_ypixel), (33, 99, 2));
            write(borrow_fd(10), b"typed").expect("written");
            assert_eq!(read_available(11), b"typed");
            write(borrow_fd(11), b"shown").expect("written");
            assert_eq!(read_available(10), b"shown");
        });
    let refused = donor.save_unchanged().refusal();
    assert!(refused.contains("is in use at the acceptor"), "{refused}");
}
