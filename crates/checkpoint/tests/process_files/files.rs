//! Files, directories, devices, nameless content, locks.

use crate::harness::{Donor, borrow_fd, close_number, put_at, read_available, stop_self};
use rustix::fs::{FallocateFlags, Timespec, Timestamps, fallocate, futimens};
use rustix::fs::{FlockOperation, MemfdFlags, Mode, OFlags, SealFlags, SeekFrom, flock};
use rustix::fs::{fcntl_add_seals, fcntl_get_seals, fcntl_getfl, memfd_create, seek};
use rustix::io::{FdFlags, fcntl_getfd};
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::os::unix::net::UnixStream;
use std::path::Path;
use tempfile::TempDir;

fn new_directory() -> TempDir {
    tempfile::tempdir().expect("a directory")
}

#[test]
fn file_keeps_position_flags_and_sharing() {
    let dir = new_directory();
    let path = dir.path().join("log");
    fs::write(&path, "0123456789").expect("written");
    let donor = Donor::new(|| {
        let mut file = File::open(&path).expect("open");
        file.read_exact(&mut [0; 4]).expect("read");
        put_at(file.try_clone().expect("dup"), 11);
        put_at(file, 10);
        let append = File::options().append(true).read(true).open(&path);
        put_at(append.expect("open"), 12);
        rustix::io::fcntl_setfd(borrow_fd(12), FdFlags::CLOEXEC).expect("set");
        stop_self();
    });
    donor.save_unchanged().restore_and_check(|_| {
        assert_eq!(seek(borrow_fd(11), SeekFrom::Current(0)), Ok(4));
        assert_eq!(read_available(10), b"456789");
        assert_eq!(seek(borrow_fd(11), SeekFrom::Current(0)), Ok(10), "shared");
        assert_eq!(
            seek(borrow_fd(12), SeekFrom::Current(0)),
            Ok(0),
            "not shared"
        );
        assert!(
            fcntl_getfl(borrow_fd(12))
                .expect("flags")
                .contains(OFlags::APPEND)
        );
        assert_eq!(fcntl_getfd(borrow_fd(12)), Ok(FdFlags::CLOEXEC));
        assert_eq!(fcntl_getfd(borrow_fd(10)), Ok(FdFlags::empty()));
        assert!(fcntl_getfd(borrow_fd(13)).is_err(), "nothing else is open");
    });
}

/// Names are arbitrary bytes: of the process, of files, directories, FIFOs and memory files, including the suffix that
/// the kernel shows after names of removed files.
#[test]
fn names_of_any_bytes_are_kept() {
    let dir = new_directory();
    let path_of = |name: &[u8]| dir.path().join(OsStr::from_bytes(name));
    let folder = path_of(b"caf\xe9 (deleted)");
    fs::create_dir(&folder).expect("made");
    let (file, fifo) = (folder.join("a (deleted)"), path_of(b"\xff\nfifo"));
    let removed = path_of(b"gone\xfe");
    fs::write(&file, "0123456789").expect("written");
    rustix::fs::mkfifoat(rustix::fs::CWD, &fifo, Mode::RUSR | Mode::WUSR).expect("fifo");
    let open = |path: &Path, flags| rustix::fs::open(path, flags, Mode::RUSR).expect("open");
    let donor = Donor::new(|| {
        // SAFETY: the name ends with a NUL and outlives the call.
        unsafe { libc::prctl(libc::PR_SET_NAME, c"\xd0name\xff".as_ptr()) };
        put_at(open(&file, OFlags::RDONLY), 10);
        put_at(open(&folder, OFlags::RDONLY | OFlags::DIRECTORY), 11);
        put_at(open(&fifo, OFlags::RDWR), 12);
        put_at(open(&removed, OFlags::RDWR | OFlags::CREATE), 13);
        fs::remove_file(&removed).expect("removed");
        rustix::io::write(borrow_fd(13), b"content").expect("written");
        put_at(
            memfd_create(c"m\xff\nm", MemfdFlags::empty()).expect("made"),
            14,
        );
        stop_self();
    });
    donor.save_unchanged().restore_and_check(|_| {
        let name = |number: i32| fs::read_link(format!("/proc/self/fd/{number}")).expect("open");
        assert_eq!(name(10), file);
        assert_eq!(read_available(10), b"0123456789");
        assert_eq!(name(11), folder);
        assert_eq!(name(12), fifo);
        let bytes = |number| name(number).into_os_string().into_vec();
        assert!(
            bytes(13).ends_with(b"/gone\xfe (deleted)"),
            "{:?}",
            name(13)
        );
        assert_eq!(seek(borrow_fd(13), SeekFrom::Start(0)), Ok(0));
        assert_eq!(read_available(13), b"content");
        assert_eq!(bytes(14), b"/memfd:m\xff\nm (deleted)");
    });
}

#[test]
fn changes_after_snapshot_are_saved() {
    let dir = new_directory();
    let path = dir.path().join("log");
    fs::write(&path, "0123456789").expect("written");
    let donor = Donor::new(|| {
        for number in [10, 11, 20] {
            put_at(File::open(&path).expect("open"), number);
        }
        stop_self();
        rustix::io::read(borrow_fd(10), &mut [0; 3]).expect("read");
        close_number(11);
        put_at(rustix::io::dup(borrow_fd(10)).expect("dup"), 11);
        close_number(20);
        put_at(
            rustix::event::eventfd(7, rustix::event::EventfdFlags::NONBLOCK).expect("made"),
            20,
        );
        put_at(
            File::create(path.with_extension("new")).expect("created"),
            300,
        );
        stop_self();
    });
    let snapshot = donor.snapshot();
    donor.continue_to_next_stop();
    donor.freeze(&snapshot).restore_and_check(|_| {
        assert_eq!(read_available(11), b"3456789");
        assert_eq!(read_available(10), b"", "shared");
        assert_eq!(read_available(20), 7u64.to_ne_bytes());
        rustix::io::write(borrow_fd(300), b"x").expect("written");
    });
    assert_eq!(fs::read(path.with_extension("new")).expect("read"), b"x");
}

/// Flags of an earlier snapshot do not persist, even if the last snapshot and the freeze have the same flags.
#[test]
fn flags_of_the_freeze_win() {
    let dir = new_directory();
    let path = dir.path().join("log");
    let set = |flags: OFlags| {
        for number in 10..14 {
            rustix::fs::fcntl_setfl(borrow_fd(number), flags).expect("set");
        }
    };
    let donor = Donor::new(|| {
        put_at(File::create(&path).expect("created"), 10);
        let (reader, writer) = std::io::pipe().expect("a pipe");
        put_at(OwnedFd::from(reader), 11);
        put_at(OwnedFd::from(writer), 12);
        let (one, other) = UnixStream::pair().expect("a pair");
        put_at(one, 13);
        put_at(other, 14);
        put_at(
            rustix::fs::open("/", OFlags::PATH, rustix::fs::Mode::empty()).expect("open"),
            15,
        );
        set(OFlags::APPEND);
        stop_self();
        set(OFlags::NONBLOCK);
        stop_self();
    });
    let snapshot = donor.snapshot();
    donor.continue_to_next_stop();
    donor.freeze_again(&snapshot).restore_and_check(|_| {
        for number in 10..14 {
            let flags = fcntl_getfl(borrow_fd(number)).expect("flags");
            let status = flags & (OFlags::APPEND | OFlags::NONBLOCK);
            assert_eq!(status, OFlags::NONBLOCK, "of {number}");
        }
    });
}

#[test]
fn missing_or_different_file_is_refused_by_name() {
    let dir = new_directory();
    let path = dir.path().join("data");
    fs::write(&path, "content").expect("written");
    let donor = Donor::new(|| {
        put_at(File::open(&path).expect("open"), 10);
        stop_self();
    });
    let before = donor.save_unchanged();
    let same_size = donor.save_unchanged();
    let longer = donor.save_unchanged();
    let copy = donor.save_unchanged();
    let name = path.to_str().expect("text");
    let replaced = |content: &str| {
        fs::rename(&path, dir.path().join("aside")).expect("renamed");
        fs::write(&path, content).expect("written");
    };
    replaced("contend");
    assert_eq!(
        same_size.refusal(),
        format!("{name} differs at the acceptor: its content")
    );
    replaced("contents");
    assert_eq!(
        longer.refusal(),
        format!("{name} differs at the acceptor: its size")
    );
    replaced("content");
    copy.restore_and_check(|_| assert_eq!(read_available(10), b"content"));
    fs::remove_file(&path).expect("removed");
    assert_eq!(
        before.refusal(),
        format!("{name} does not exist at the acceptor")
    );
}

#[test]
fn nameless_content_moves_by_value() {
    let dir = new_directory();
    let path = dir.path().join("gone");
    let donor = Donor::new(|| {
        let mut file = File::options()
            .read(true)
            .write(true)
            .create_new(true)
            .open(&path);
        let file = file.as_mut().expect("created");
        put_at(File::open(&path).expect("open"), 12);
        fs::remove_file(&path).expect("removed");
        file.write_all(b"deleted").expect("written");
        file.write_all_at(b"far", 5 << 20).expect("written");
        put_at(file.try_clone().expect("dup"), 10);
        let mut temporary = File::options();
        temporary
            .read(true)
            .write(true)
            .custom_flags(libc::O_TMPFILE);
        let mut temporary = temporary.open(dir.path()).expect("open");
        temporary.write_all(b"temporary").expect("written");
        put_at(temporary, 11);
        stop_self();
        write_through_proc(12, b"changed");
        stop_self();
    });
    let snapshot = donor.snapshot();
    donor.continue_to_next_stop();
    let saved = donor.freeze(&snapshot);
    assert!(postcard::to_stdvec(&saved.changes).expect("coded").len() < 70_000);
    saved.restore_and_check(|_| {
        let mut buffer = [0; 7];
        rustix::io::pread(borrow_fd(12), &mut buffer, 0).expect("read");
        assert_eq!(&buffer, b"changed");
        assert_eq!(seek(borrow_fd(10), SeekFrom::Current(0)), Ok(7));
        rustix::io::pwrite(borrow_fd(10), b"D", 0).expect("written");
        rustix::io::pread(borrow_fd(12), &mut buffer, 0).expect("read");
        assert_eq!(&buffer, b"Dhanged", "one file");
        rustix::io::pread(borrow_fd(12), &mut buffer, 5 << 20).expect("read");
        assert_eq!(&buffer[..3], b"far");
        let stat = rustix::fs::fstat(borrow_fd(10)).expect("stat");
        assert!(
            stat.st_blocks < 1000 && stat.st_nlink == 0,
            "holes stay holes"
        );
        rustix::io::pread(borrow_fd(11), &mut buffer, 0).expect("read");
        assert_eq!(&buffer, b"tempora");
        // Only a file made by O_TMPFILE can still get a name.
        let name = dir.path().join("named");
        let flags = rustix::fs::AtFlags::SYMLINK_FOLLOW;
        let cwd = rustix::fs::CWD;
        rustix::fs::linkat(cwd, "/proc/self/fd/11", cwd, name, flags).expect("linked");
    });
}

/// Returns the data extents of a file, in units of 4,096 bytes.
fn extents(number: i32) -> Vec<(u64, u64)> {
    let mut found = Vec::new();
    let mut at_byte = 0;
    while let Ok(data) = seek(borrow_fd(number), SeekFrom::Data(at_byte)) {
        at_byte = seek(borrow_fd(number), SeekFrom::Hole(data)).expect("an end");
        found.push((data / 4096, at_byte.div_ceil(4096)));
    }
    found
}

#[test]
fn nameless_content_keeps_holes_and_times() {
    let dir = new_directory();
    let write = |number: i32, page: u64, bytes: &[u8]| {
        let written = rustix::io::pwrite(borrow_fd(number), bytes, page * 4096);
        assert_eq!(written.expect("written"), bytes.len());
    };
    let set_times = |number: i32, seconds: i64| {
        let time = |tv_nsec| Timespec {
            tv_sec: seconds,
            tv_nsec,
        };
        let times = Timestamps {
            last_access: time(1),
            last_modification: time(2),
        };
        futimens(borrow_fd(number), &times).expect("dated");
    };
    let donor = Donor::new(|| {
        let path = dir.path().join("gone");
        put_at(File::create_new(&path).expect("created"), 20);
        put_at(
            File::options()
                .read(true)
                .write(true)
                .open(&path)
                .expect("opened"),
            10,
        );
        close_number(20);
        fs::remove_file(&path).expect("removed");
        put_at(
            memfd_create("holes", MemfdFlags::empty()).expect("made"),
            11,
        );
        for number in [10, 11] {
            write(number, 0, b"begin");
            // Zeros that were written are not a hole.
            write(number, 2, &[0; 4096]);
            write(number, 20, &[7; 3 * 4096]);
            write(number, 100, b"end");
            set_times(number, 1_000_000);
        }
        stop_self();
        for number in [10, 11] {
            let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            fallocate(borrow_fd(number), hole, 21 * 4096, 4096).expect("a hole");
            write(number, 5, b"more");
            set_times(number, -2_000_000);
        }
        stop_self();
    });
    let snapshot = donor.snapshot();
    let original_extents = |donor: &Donor| {
        [10, 11].map(|number| {
            let copy = donor.copy(number);
            extents(copy.as_raw_fd())
        })
    };
    let check_extents = |holes: [Vec<(u64, u64)>; 2], seconds: i64| {
        move |_| {
            for (number, holes) in [10, 11].into_iter().zip(&holes) {
                let stat = rustix::fs::fstat(borrow_fd(number)).expect("stat");
                assert_eq!((stat.st_atime, stat.st_atime_nsec), (seconds, 1));
                assert_eq!((stat.st_mtime, stat.st_mtime_nsec), (seconds, 2));
                assert_eq!(extents(number), *holes);
            }
        }
    };
    let holes = original_extents(&donor);
    assert!(holes.iter().all(|holes| holes.len() >= 3), "{holes:?}");
    donor
        .freeze(&snapshot)
        .restore_and_check(check_extents(holes, 1_000_000));
    let snapshot = donor.snapshot();
    donor.continue_to_next_stop();
    let holes = original_extents(&donor);
    donor
        .freeze(&snapshot)
        .restore_and_check(check_extents(holes, -2_000_000));
}

/// A memory file cannot be executed while it is open for writing by path, so the restored one must not be.
#[test]
fn memory_file_can_be_executed() {
    let donor = Donor::new(|| {
        let memory = memfd_create("program", MemfdFlags::empty()).expect("made");
        rustix::io::write(&memory, b"#!/bin/true\n").expect("written");
        put_at(memory, 10);
        stop_self();
    });
    donor.save_unchanged().restore_and_check(|_| {
        let status = std::process::Command::new("/proc/self/fd/10").status();
        assert!(status.expect("executed").success());
    });
}

/// Writes into a file that is only open for reading here.
fn write_through_proc(number: i32, bytes: &[u8]) {
    let path = format!("/proc/self/fd/{number}");
    let file = File::options().write(true).open(path).expect("open");
    file.write_all_at(bytes, 0).expect("written");
}

#[test]
fn memory_files_keep_name_and_seals() {
    let donor = Donor::new(|| {
        let flags = MemfdFlags::ALLOW_SEALING | MemfdFlags::CLOEXEC;
        let memory = memfd_create("store", flags).expect("made");
        rustix::io::write(&memory, b"abc").expect("written");
        fcntl_add_seals(&memory, SealFlags::WRITE | SealFlags::GROW).expect("sealed");
        put_at(memory, 10);
        put_at(
            memfd_create("never", MemfdFlags::empty()).expect("made"),
            11,
        );
        stop_self();
    });
    donor.save_unchanged().restore_and_check(|_| {
        let link = fs::read_link("/proc/self/fd/10").expect("link");
        assert_eq!(link.to_str(), Some("/memfd:store (deleted)"));
        assert_eq!(
            fcntl_get_seals(borrow_fd(10)),
            Ok(SealFlags::WRITE | SealFlags::GROW)
        );
        assert_eq!(seek(borrow_fd(10), SeekFrom::Start(0)), Ok(0));
        assert_eq!(read_available(10), b"abc");
        assert!(rustix::io::write(borrow_fd(10), b"x").is_err());
        assert_eq!(fcntl_get_seals(borrow_fd(11)), Ok(SealFlags::SEAL));
    });
}

#[test]
fn image_cannot_truncate_a_file() {
    let dir = new_directory();
    let path = dir.path().join("precious");
    fs::write(&path, "content").expect("written");
    let donor = Donor::new(|| {
        let file = File::options().read(true).write(true).open(&path);
        put_at(file.expect("open"), 10);
        stop_self();
    });
    let mut image = donor.snapshot().image;
    for file in image.files.values_mut() {
        file.flags |= (libc::O_TRUNC | libc::O_CREAT) as u32;
    }
    let panic_message = crate::harness::panic_message_of_child(|| {
        use holdfast_checkpoint::files::{FdStore, ProvidedFiles};
        FdStore::prepare(image, ProvidedFiles::default()).expect("prepared");
    });
    assert_eq!(
        (panic_message.as_str(), fs::read(&path).expect("read")),
        ("", b"content".to_vec())
    );
}

#[test]
fn renamed_file_is_found() {
    let dir = new_directory();
    let (first, second) = (dir.path().join("first"), dir.path().join("deep/second"));
    fs::create_dir(dir.path().join("deep")).expect("made");
    fs::write(&first, "linked").expect("written");
    fs::hard_link(&first, &second).expect("linked");
    let inode = fs::metadata(&first).expect("stat").ino();
    let donor = Donor::new(|| {
        put_at(File::open(&first).expect("open"), 10);
        fs::remove_file(&first).expect("removed");
        stop_self();
    });
    donor.save_unchanged().restore_and_check(|_| {
        assert_eq!(
            rustix::fs::fstat(borrow_fd(10)).expect("stat").st_ino,
            inode
        );
        assert_eq!(read_available(10), b"linked");
    });
}

#[test]
fn directory_offset_is_kept() {
    let dir = new_directory();
    for number in 0..100 {
        File::create(dir.path().join(format!("file{number}"))).expect("created");
    }
    let donor = Donor::new(|| {
        let open = File::open(dir.path()).expect("open");
        let (names, _) = read_entries(&open.into(), 10);
        fs::write(dir.path().join("read"), names.join("\n")).expect("written");
        stop_self();
    });
    donor.save_unchanged().restore_and_check(|_| {
        let before = fs::read_to_string(dir.path().join("read")).expect("read");
        let (after, _) = read_entries(&borrow_fd(10).try_clone_to_owned().expect("dup"), 1000);
        let mut all: Vec<&str> = before
            .lines()
            .chain(after.iter().map(String::as_str))
            .collect();
        all.retain(|name| name.starts_with("file"));
        let count = all.len();
        all.sort_unstable();
        all.dedup();
        assert_eq!((count, all.len()), (100, 100), "names are unique");
    });
}

/// Reads some entries, and leaves the directory offset there.
fn read_entries(dir: &OwnedFd, entries_max: usize) -> (Vec<String>, usize) {
    // A small buffer, so that reading ends in the middle.
    let mut space = vec![std::mem::MaybeUninit::uninit(); 1024];
    let mut names = Vec::new();
    let mut entries = rustix::fs::RawDir::new(dir, &mut space);
    while let Some(entry) = entries.next() {
        names.push(
            entry
                .expect("entry")
                .file_name()
                .to_str()
                .expect("text")
                .to_string(),
        );
        if names.len() >= entries_max && entries.is_buffer_empty() {
            break;
        }
    }
    put_at(dir.try_clone().expect("dup"), 10);
    (names, entries_max)
}

#[test]
fn host_independent_devices_are_reopened() {
    let names = ["null", "zero", "full", "random", "urandom"];
    let donor = Donor::new(|| {
        for (number, name) in (10..).zip(names) {
            put_at(File::open(format!("/dev/{name}")).expect("open"), number);
        }
        stop_self();
    });
    donor.save_unchanged().restore_and_check(|_| {
        for (number, name) in (10..).zip(names) {
            let link = fs::read_link(format!("/proc/self/fd/{number}")).expect("link");
            assert_eq!(link.to_str(), Some(format!("/dev/{name}").as_str()));
        }
        assert!(read_available(11).iter().all(|byte| *byte == 0));
    });
}

#[test]
fn locks_are_reacquired() {
    let dir = new_directory();
    let path = dir.path().join("locked");
    fs::write(&path, "0123456789").expect("written");
    let open = || {
        File::options()
            .read(true)
            .write(true)
            .open(&path)
            .expect("open")
    };
    let lock = |number, command, kind: i32, start, length| {
        // SAFETY: all-zero bytes are a valid `flock`.
        let mut lock: libc::flock = unsafe { std::mem::zeroed() };
        (lock.l_type, lock.l_start, lock.l_len) = (kind as i16, start, length);
        // SAFETY: `lock` is readable and writable and outlives the call.
        let outcome = unsafe { libc::fcntl(number, command, &raw mut lock) };
        (outcome == 0).then_some((i32::from(lock.l_type), lock.l_start, lock.l_len))
    };
    let donor = Donor::new(|| {
        for number in 10..13 {
            put_at(open(), number);
        }
        flock(borrow_fd(10), FlockOperation::LockExclusive).expect("locked");
        lock(11, libc::F_SETLK, libc::F_WRLCK, 2, 3).expect("locked");
        lock(12, libc::F_OFD_SETLK, libc::F_RDLCK, 7, 0).expect("locked");
        stop_self();
    });
    let saved = donor.save_unchanged();
    drop(donor);
    saved.restore_and_check(|_| {
        let other = open();
        assert!(flock(&other, FlockOperation::NonBlockingLockShared).is_err());
        // The descriptor is not closed: closing any descriptor of the file releases the process's record locks.
        let other = std::os::fd::IntoRawFd::into_raw_fd(other);
        let conflicting_lock =
            |start| lock(other, libc::F_OFD_GETLK, libc::F_WRLCK, start, 1).expect("asked");
        assert_eq!(conflicting_lock(0).0, libc::F_UNLCK);
        assert_eq!(conflicting_lock(2), (libc::F_WRLCK, 2, 3));
        assert_eq!(conflicting_lock(5).0, libc::F_UNLCK);
        assert_eq!(conflicting_lock(8), (libc::F_RDLCK, 7, 0));
    });
}
