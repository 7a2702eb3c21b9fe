//! Files, directories, devices, nameless content, locks.

use crate::harness::{Donor, at, close, put, read, stop};
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

fn directory() -> TempDir {
    tempfile::tempdir().expect("a directory")
}

#[test]
fn a_file_keeps_position_flags_and_sharing() {
    let dir = directory();
    let path = dir.path().join("log");
    fs::write(&path, "0123456789").expect("written");
    let donor = Donor::new(|| {
        let mut file = File::open(&path).expect("open");
        file.read_exact(&mut [0; 4]).expect("read");
        put(file.try_clone().expect("dup"), 11);
        put(file, 10);
        let append = File::options().append(true).read(true).open(&path);
        put(append.expect("open"), 12);
        rustix::io::fcntl_setfd(at(12), FdFlags::CLOEXEC).expect("set");
        stop();
    });
    donor.save().restored(|_| {
        assert_eq!(seek(at(11), SeekFrom::Current(0)), Ok(4));
        assert_eq!(read(10), b"456789");
        assert_eq!(seek(at(11), SeekFrom::Current(0)), Ok(10), "shared");
        assert_eq!(seek(at(12), SeekFrom::Current(0)), Ok(0), "not shared");
        assert!(fcntl_getfl(at(12)).expect("flags").contains(OFlags::APPEND));
        assert_eq!(fcntl_getfd(at(12)), Ok(FdFlags::CLOEXEC));
        assert_eq!(fcntl_getfd(at(10)), Ok(FdFlags::empty()));
        assert!(fcntl_getfd(at(13)).is_err(), "nothing else is open");
    });
}

/// Names are arbitrary bytes: of the process, of files, directories, FIFOs and memory files, including the suffix that
/// the kernel shows after names of removed files.
#[test]
fn names_of_any_bytes_are_kept() {
    let dir = directory();
    let below = |name: &[u8]| dir.path().join(OsStr::from_bytes(name));
    let folder = below(b"caf\xe9 (deleted)");
    fs::create_dir(&folder).expect("made");
    let (file, fifo) = (folder.join("a (deleted)"), below(b"\xff\nfifo"));
    let removed = below(b"gone\xfe");
    fs::write(&file, "0123456789").expect("written");
    rustix::fs::mkfifoat(rustix::fs::CWD, &fifo, Mode::RUSR | Mode::WUSR).expect("fifo");
    let open = |path: &Path, flags| rustix::fs::open(path, flags, Mode::RUSR).expect("open");
    let donor = Donor::new(|| {
        // SAFETY: the name ends with a NUL and outlives the call.
        unsafe { libc::prctl(libc::PR_SET_NAME, c"\xd0name\xff".as_ptr()) };
        put(open(&file, OFlags::RDONLY), 10);
        put(open(&folder, OFlags::RDONLY | OFlags::DIRECTORY), 11);
        put(open(&fifo, OFlags::RDWR), 12);
        put(open(&removed, OFlags::RDWR | OFlags::CREATE), 13);
        fs::remove_file(&removed).expect("removed");
        rustix::io::write(at(13), b"content").expect("written");
        put(
            memfd_create(c"m\xff\nm", MemfdFlags::empty()).expect("made"),
            14,
        );
        stop();
    });
    donor.save().restored(|_| {
        let name = |number: i32| fs::read_link(format!("/proc/self/fd/{number}")).expect("open");
        assert_eq!(name(10), file);
        assert_eq!(read(10), b"0123456789");
        assert_eq!(name(11), folder);
        assert_eq!(name(12), fifo);
        let bytes = |number| name(number).into_os_string().into_vec();
        assert!(
            bytes(13).ends_with(b"/gone\xfe (deleted)"),
            "{:?}",
            name(13)
        );
        assert_eq!(seek(at(13), SeekFrom::Start(0)), Ok(0));
        assert_eq!(read(13), b"content");
        assert_eq!(bytes(14), b"/memfd:m\xff\nm (deleted)");
    });
}

#[test]
fn what_changed_while_it_was_saved_is_followed() {
    let dir = directory();
    let path = dir.path().join("log");
    fs::write(&path, "0123456789").expect("written");
    let donor = Donor::new(|| {
        for number in [10, 11, 20] {
            put(File::open(&path).expect("open"), number);
        }
        stop();
        rustix::io::read(at(10), &mut [0; 3]).expect("read");
        close(11);
        put(rustix::io::dup(at(10)).expect("dup"), 11);
        close(20);
        put(
            rustix::event::eventfd(7, rustix::event::EventfdFlags::NONBLOCK).expect("made"),
            20,
        );
        put(
            File::create(path.with_extension("new")).expect("created"),
            300,
        );
        stop();
    });
    let draft = donor.draft();
    donor.run_on();
    donor.freeze(&draft).restored(|_| {
        assert_eq!(read(11), b"3456789");
        assert_eq!(read(10), b"", "shared");
        assert_eq!(read(20), 7u64.to_ne_bytes());
        rustix::io::write(at(300), b"x").expect("written");
    });
    assert_eq!(fs::read(path.with_extension("new")).expect("read"), b"x");
}

/// Flags of an earlier draft do not persist, even if the last draft and the freeze have the same flags.
#[test]
fn flags_are_the_last_ones() {
    let dir = directory();
    let path = dir.path().join("log");
    let set = |flags: OFlags| {
        for number in 10..14 {
            rustix::fs::fcntl_setfl(at(number), flags).expect("set");
        }
    };
    let donor = Donor::new(|| {
        put(File::create(&path).expect("created"), 10);
        let (reader, writer) = std::io::pipe().expect("a pipe");
        put(OwnedFd::from(reader), 11);
        put(OwnedFd::from(writer), 12);
        let (one, other) = UnixStream::pair().expect("a pair");
        put(one, 13);
        put(other, 14);
        put(
            rustix::fs::open("/", OFlags::PATH, rustix::fs::Mode::empty()).expect("open"),
            15,
        );
        set(OFlags::APPEND);
        stop();
        set(OFlags::NONBLOCK);
        stop();
    });
    let draft = donor.draft();
    donor.run_on();
    donor.freeze_again(&draft).restored(|_| {
        for number in 10..14 {
            let flags = fcntl_getfl(at(number)).expect("flags");
            let status = flags & (OFlags::APPEND | OFlags::NONBLOCK);
            assert_eq!(status, OFlags::NONBLOCK, "of {number}");
        }
    });
}

#[test]
fn a_file_that_is_missing_or_differs_is_refused_by_name() {
    let dir = directory();
    let path = dir.path().join("data");
    fs::write(&path, "content").expect("written");
    let donor = Donor::new(|| {
        put(File::open(&path).expect("open"), 10);
        stop();
    });
    let before = donor.save();
    let same_size = donor.save();
    let longer = donor.save();
    let copy = donor.save();
    let name = path.to_str().expect("text");
    let replaced = |content: &str| {
        fs::rename(&path, dir.path().join("aside")).expect("renamed");
        fs::write(&path, content).expect("written");
    };
    replaced("contend");
    assert_eq!(
        same_size.refused(),
        format!("{name} differs at the acceptor: its content")
    );
    replaced("contents");
    assert_eq!(
        longer.refused(),
        format!("{name} differs at the acceptor: its size")
    );
    replaced("content");
    copy.restored(|_| assert_eq!(read(10), b"content"));
    fs::remove_file(&path).expect("removed");
    assert_eq!(
        before.refused(),
        format!("{name} does not exist at the acceptor")
    );
}

#[test]
fn content_without_a_name_moves_by_value() {
    let dir = directory();
    let path = dir.path().join("gone");
    let donor = Donor::new(|| {
        let mut file = File::options()
            .read(true)
            .write(true)
            .create_new(true)
            .open(&path);
        let file = file.as_mut().expect("created");
        put(File::open(&path).expect("open"), 12);
        fs::remove_file(&path).expect("removed");
        file.write_all(b"deleted").expect("written");
        file.write_all_at(b"far", 5 << 20).expect("written");
        put(file.try_clone().expect("dup"), 10);
        let mut temporary = File::options();
        temporary
            .read(true)
            .write(true)
            .custom_flags(libc::O_TMPFILE);
        let mut temporary = temporary.open(dir.path()).expect("open");
        temporary.write_all(b"temporary").expect("written");
        put(temporary, 11);
        stop();
        at_offset(12, b"changed");
        stop();
    });
    let draft = donor.draft();
    donor.run_on();
    let saved = donor.freeze(&draft);
    assert!(postcard::to_stdvec(&saved.changes).expect("coded").len() < 70_000);
    saved.restored(|_| {
        let mut buffer = [0; 7];
        rustix::io::pread(at(12), &mut buffer, 0).expect("read");
        assert_eq!(&buffer, b"changed");
        assert_eq!(seek(at(10), SeekFrom::Current(0)), Ok(7));
        rustix::io::pwrite(at(10), b"D", 0).expect("written");
        rustix::io::pread(at(12), &mut buffer, 0).expect("read");
        assert_eq!(&buffer, b"Dhanged", "one file");
        rustix::io::pread(at(12), &mut buffer, 5 << 20).expect("read");
        assert_eq!(&buffer[..3], b"far");
        let stat = rustix::fs::fstat(at(10)).expect("stat");
        assert!(
            stat.st_blocks < 1000 && stat.st_nlink == 0,
            "holes stay holes"
        );
        rustix::io::pread(at(11), &mut buffer, 0).expect("read");
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
    while let Ok(data) = seek(at(number), SeekFrom::Data(at_byte)) {
        at_byte = seek(at(number), SeekFrom::Hole(data)).expect("an end");
        found.push((data / 4096, at_byte.div_ceil(4096)));
    }
    found
}

#[test]
fn content_without_a_name_keeps_its_holes_and_times() {
    let dir = directory();
    let write = |number: i32, page: u64, bytes: &[u8]| {
        let written = rustix::io::pwrite(at(number), bytes, page * 4096);
        assert_eq!(written.expect("written"), bytes.len());
    };
    let date = |number: i32, seconds: i64| {
        let time = |tv_nsec| Timespec {
            tv_sec: seconds,
            tv_nsec,
        };
        let times = Timestamps {
            last_access: time(1),
            last_modification: time(2),
        };
        futimens(at(number), &times).expect("dated");
    };
    let donor = Donor::new(|| {
        let path = dir.path().join("gone");
        put(File::create_new(&path).expect("created"), 20);
        put(
            File::options()
                .read(true)
                .write(true)
                .open(&path)
                .expect("opened"),
            10,
        );
        close(20);
        fs::remove_file(&path).expect("removed");
        put(
            memfd_create("holes", MemfdFlags::empty()).expect("made"),
            11,
        );
        for number in [10, 11] {
            write(number, 0, b"begin");
            // Zeros that were written are not a hole.
            write(number, 2, &[0; 4096]);
            write(number, 20, &[7; 3 * 4096]);
            write(number, 100, b"end");
            date(number, 1_000_000);
        }
        stop();
        for number in [10, 11] {
            let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            fallocate(at(number), hole, 21 * 4096, 4096).expect("a hole");
            write(number, 5, b"more");
            date(number, -2_000_000);
        }
        stop();
    });
    let draft = donor.draft();
    let wanted = |donor: &Donor| {
        [10, 11].map(|number| {
            let copy = donor.copy(number);
            extents(copy.as_raw_fd())
        })
    };
    let check = |holes: [Vec<(u64, u64)>; 2], seconds: i64| {
        move |_| {
            for (number, holes) in [10, 11].into_iter().zip(&holes) {
                let stat = rustix::fs::fstat(at(number)).expect("stat");
                assert_eq!((stat.st_atime, stat.st_atime_nsec), (seconds, 1));
                assert_eq!((stat.st_mtime, stat.st_mtime_nsec), (seconds, 2));
                assert_eq!(extents(number), *holes);
            }
        }
    };
    let holes = wanted(&donor);
    assert!(holes.iter().all(|holes| holes.len() >= 3), "{holes:?}");
    donor.freeze(&draft).restored(check(holes, 1_000_000));
    let draft = donor.draft();
    donor.run_on();
    let holes = wanted(&donor);
    donor.freeze(&draft).restored(check(holes, -2_000_000));
}

/// A memory file cannot be executed while it is open for writing by path, so the restored one must not be.
#[test]
fn a_memory_file_can_be_executed() {
    let donor = Donor::new(|| {
        let memory = memfd_create("program", MemfdFlags::empty()).expect("made");
        rustix::io::write(&memory, b"#!/bin/true\n").expect("written");
        put(memory, 10);
        stop();
    });
    donor.save().restored(|_| {
        let status = std::process::Command::new("/proc/self/fd/10").status();
        assert!(status.expect("executed").success());
    });
}

/// Writes into a file that is only open for reading here.
fn at_offset(number: i32, bytes: &[u8]) {
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
        put(memory, 10);
        put(
            memfd_create("never", MemfdFlags::empty()).expect("made"),
            11,
        );
        stop();
    });
    donor.save().restored(|_| {
        let link = fs::read_link("/proc/self/fd/10").expect("link");
        assert_eq!(link.to_str(), Some("/memfd:store (deleted)"));
        assert_eq!(
            fcntl_get_seals(at(10)),
            Ok(SealFlags::WRITE | SealFlags::GROW)
        );
        assert_eq!(seek(at(10), SeekFrom::Start(0)), Ok(0));
        assert_eq!(read(10), b"abc");
        assert!(rustix::io::write(at(10), b"x").is_err());
        assert_eq!(fcntl_get_seals(at(11)), Ok(SealFlags::SEAL));
    });
}

#[test]
fn an_image_cannot_empty_a_file() {
    let dir = directory();
    let path = dir.path().join("precious");
    fs::write(&path, "content").expect("written");
    let donor = Donor::new(|| {
        let file = File::options().read(true).write(true).open(&path);
        put(file.expect("open"), 10);
        stop();
    });
    let mut image = donor.draft().image;
    for file in image.files.values_mut() {
        file.flags |= (libc::O_TRUNC | libc::O_CREAT) as u32;
    }
    let said = crate::harness::in_child(|| {
        use holdfast_sys::process::files::{Given, Stock};
        Stock::prepare(image, Given::default()).expect("prepared");
    });
    assert_eq!(
        (said.as_str(), fs::read(&path).expect("read")),
        ("", b"content".to_vec())
    );
}

#[test]
fn another_name_of_a_file_is_found() {
    let dir = directory();
    let (first, second) = (dir.path().join("first"), dir.path().join("deep/second"));
    fs::create_dir(dir.path().join("deep")).expect("made");
    fs::write(&first, "linked").expect("written");
    fs::hard_link(&first, &second).expect("linked");
    let inode = fs::metadata(&first).expect("stat").ino();
    let donor = Donor::new(|| {
        put(File::open(&first).expect("open"), 10);
        fs::remove_file(&first).expect("removed");
        stop();
    });
    donor.save().restored(|_| {
        assert_eq!(rustix::fs::fstat(at(10)).expect("stat").st_ino, inode);
        assert_eq!(read(10), b"linked");
    });
}

#[test]
fn a_directory_goes_on_where_it_was() {
    let dir = directory();
    for number in 0..100 {
        File::create(dir.path().join(format!("file{number}"))).expect("created");
    }
    let donor = Donor::new(|| {
        let open = File::open(dir.path()).expect("open");
        let (names, _) = list(&open.into(), 10);
        fs::write(dir.path().join("read"), names.join("\n")).expect("written");
        stop();
    });
    donor.save().restored(|_| {
        let before = fs::read_to_string(dir.path().join("read")).expect("read");
        let (after, _) = list(&at(10).try_clone_to_owned().expect("dup"), 1000);
        let mut all: Vec<&str> = before
            .lines()
            .chain(after.iter().map(String::as_str))
            .collect();
        all.retain(|name| name.starts_with("file"));
        let count = all.len();
        all.sort_unstable();
        all.dedup();
        assert_eq!((count, all.len()), (100, 100), "each name once");
    });
}

/// Reads some entries, and leaves the directory offset there.
fn list(dir: &OwnedFd, most: usize) -> (Vec<String>, usize) {
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
        if names.len() >= most && entries.is_buffer_empty() {
            break;
        }
    }
    put(dir.try_clone().expect("dup"), 10);
    (names, most)
}

#[test]
fn devices_that_are_the_same_everywhere_are_opened_again() {
    let names = ["null", "zero", "full", "random", "urandom"];
    let donor = Donor::new(|| {
        for (number, name) in (10..).zip(names) {
            put(File::open(format!("/dev/{name}")).expect("open"), number);
        }
        stop();
    });
    donor.save().restored(|_| {
        for (number, name) in (10..).zip(names) {
            let link = fs::read_link(format!("/proc/self/fd/{number}")).expect("link");
            assert_eq!(link.to_str(), Some(format!("/dev/{name}").as_str()));
        }
        assert!(read(11).iter().all(|byte| *byte == 0));
    });
}

#[test]
fn locks_are_taken_again() {
    let dir = directory();
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
            put(open(), number);
        }
        flock(at(10), FlockOperation::LockExclusive).expect("locked");
        lock(11, libc::F_SETLK, libc::F_WRLCK, 2, 3).expect("locked");
        lock(12, libc::F_OFD_SETLK, libc::F_RDLCK, 7, 0).expect("locked");
        stop();
    });
    let saved = donor.save();
    drop(donor);
    saved.restored(|_| {
        let other = open();
        assert!(flock(&other, FlockOperation::NonBlockingLockShared).is_err());
        // The descriptor is not closed: closing any descriptor of the file releases the process's record locks.
        let other = std::os::fd::IntoRawFd::into_raw_fd(other);
        let seen = |start| lock(other, libc::F_OFD_GETLK, libc::F_WRLCK, start, 1).expect("asked");
        assert_eq!(seen(0).0, libc::F_UNLCK);
        assert_eq!(seen(2), (libc::F_WRLCK, 2, 3));
        assert_eq!(seen(5).0, libc::F_UNLCK);
        assert_eq!(seen(8), (libc::F_RDLCK, 7, 0));
    });
}
