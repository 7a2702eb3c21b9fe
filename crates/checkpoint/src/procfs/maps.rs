//! Lines of `/proc/PID/maps` and `smaps`.

/// A mapping as procfs shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MapLine {
    /// First address.
    pub start: u64,
    /// First address behind the mapping.
    pub end: u64,
    /// `PROT_READ`, `PROT_WRITE`, `PROT_EXEC`.
    pub protection: i32,
    /// True for a shared mapping, false for a private one (copy on write).
    pub shared: bool,
    /// Offset in the file, bytes.
    pub offset: u64,
    /// Device of the file, major and minor.
    pub device: (u32, u32),
    /// Inode of the file; 0 for anonymous memory.
    pub inode: u64,
    /// Path, name in brackets, or empty.
    pub name: Vec<u8>,
    /// Flags of the `VmFlags` line; only in `smaps`.
    pub vm_flags: Option<VmFlags>,
}

/// Attributes of a mapping besides its protection (`VmFlags` in `smaps`), as a set of bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VmFlags(pub u32);

impl VmFlags {
    /// `MAP_GROWSDOWN`.
    pub const GROWS_DOWN: u32 = 1;
    /// `mlock`.
    pub const LOCKED: u32 = 1 << 1;
    /// `MADV_DONTFORK`.
    pub const DONT_FORK: u32 = 1 << 2;
    /// `MADV_DONTDUMP`.
    pub const DONT_DUMP: u32 = 1 << 3;
    /// `MADV_WIPEONFORK`.
    pub const WIPE_ON_FORK: u32 = 1 << 4;
    /// `MADV_HUGEPAGE`.
    pub const HUGE: u32 = 1 << 5;
    /// `MADV_NOHUGEPAGE`.
    pub const NO_HUGE: u32 = 1 << 6;
    /// `MADV_MERGEABLE`.
    pub const MERGEABLE: u32 = 1 << 7;
    /// `MADV_SEQUENTIAL`.
    pub const SEQUENTIAL: u32 = 1 << 8;
    /// `MADV_RANDOM`.
    pub const RANDOM: u32 = 1 << 9;
    /// `MAP_NORESERVE`.
    pub const NO_RESERVE: u32 = 1 << 10;
    /// Memory of a device.
    pub const DEVICE: u32 = 1 << 11;
    /// Pages of `hugetlbfs`.
    pub const HUGETLB: u32 = 1 << 12;
    /// Registered with a `userfaultfd`.
    pub const USERFAULT: u32 = 1 << 13;
    /// `MAP_SYNC` or sealed (`mseal`): the mapping cannot be recreated or cannot be unmapped.
    pub const SEALED: u32 = 1 << 14;
    /// A shadow stack.
    pub const SHADOW_STACK: u32 = 1 << 15;
    /// `MAP_DROPPABLE`.
    pub const DROPPABLE: u32 = 1 << 16;
    /// `MLOCK_ONFAULT`.
    pub const LOCKED_ON_FAULT: u32 = 1 << 17;
    /// The mapping may be made writable.
    pub const MAY_WRITE: u32 = 1 << 18;
    /// `pkey_mprotect` with a key.
    pub const KEY: u32 = 1 << 19;

    /// Names in `VmFlags` (`Documentation/filesystems/proc.rst`).
    const NAMES: [(&'static str, u32); 21] = [
        ("gd", Self::GROWS_DOWN),
        ("lo", Self::LOCKED),
        ("dc", Self::DONT_FORK),
        ("dd", Self::DONT_DUMP),
        ("wf", Self::WIPE_ON_FORK),
        ("hg", Self::HUGE),
        ("nh", Self::NO_HUGE),
        ("mg", Self::MERGEABLE),
        ("sr", Self::SEQUENTIAL),
        ("rr", Self::RANDOM),
        ("nr", Self::NO_RESERVE),
        ("io", Self::DEVICE),
        ("pf", Self::DEVICE),
        ("ht", Self::HUGETLB),
        ("um", Self::USERFAULT),
        ("ui", Self::USERFAULT),
        ("sl", Self::SEALED),
        ("ss", Self::SHADOW_STACK),
        ("dp", Self::DROPPABLE),
        ("lf", Self::LOCKED_ON_FAULT),
        ("mw", Self::MAY_WRITE),
    ];

    /// Returns true if any of these bits is set.
    #[must_use]
    pub fn has_any(self, bits: u32) -> bool {
        self.0 & bits != 0
    }

    fn parse(words: &[u8]) -> Self {
        let flag_of = |word: &[u8]| {
            let found = Self::NAMES.iter().find(|(name, _)| name.as_bytes() == word);
            found.map_or(0, |(_, bit)| *bit)
        };
        Self(
            words
                .split(u8::is_ascii_whitespace)
                .fold(0, |set, word| set | flag_of(word)),
        )
    }
}

/// Parses the text of `maps` or `smaps`; `None` if a line is malformed.
#[must_use]
pub fn parse_maps(text: &[u8]) -> Option<Vec<MapLine>> {
    let mut found: Vec<MapLine> = Vec::new();
    let mut has_key = false;
    for line in text
        .split(|byte| *byte == b'\n')
        .filter(|line| !line.is_empty())
    {
        if let Some(flags) = line.strip_prefix(b"VmFlags:") {
            let key = if std::mem::take(&mut has_key) {
                VmFlags::KEY
            } else {
                0
            };
            found.last_mut()?.vm_flags = Some(VmFlags(VmFlags::parse(flags).0 | key));
        } else if let Some(key) = line.strip_prefix(b"ProtectionKey:") {
            has_key = key.trim_ascii() != b"0";
        } else if !line[0].is_ascii_uppercase() {
            found.push(parse_line(line)?);
        }
    }
    Some(found)
}

/// Reduces the text of `smaps` to the text of `maps`: the first line of each mapping.
pub(crate) fn smaps_to_maps(smaps: &[u8]) -> Vec<u8> {
    let lines = smaps.split_inclusive(|byte| *byte == b'\n');
    let mapping_lines = lines.filter(|line| !line[0].is_ascii_uppercase());
    mapping_lines.flatten().copied().collect()
}

fn parse_line(line: &[u8]) -> Option<MapLine> {
    let mut rest = line;
    let mut word = || {
        let start = rest.iter().position(|byte| *byte != b' ')?;
        let tail = &rest[start..];
        let length = tail
            .iter()
            .position(|byte| *byte == b' ')
            .unwrap_or(tail.len());
        rest = &tail[length..];
        std::str::from_utf8(&tail[..length]).ok()
    };
    let (start, end) = word()?.split_once('-')?;
    let flags = word()?.as_bytes();
    let offset = hex(word()?)?;
    let (major, minor) = word()?.split_once(':')?;
    let inode = word()?.parse().ok()?;
    let bit = |at: usize, letter: u8, value: i32| match flags.get(at) {
        Some(found) if *found == letter => value,
        _ => 0,
    };
    let name = rest
        .iter()
        .position(|byte| *byte != b' ')
        .map_or(&[][..], |at| &rest[at..]);
    Some(MapLine {
        start: hex(start)?,
        end: hex(end)?,
        protection: bit(0, b'r', libc::PROT_READ)
            | bit(1, b'w', libc::PROT_WRITE)
            | bit(2, b'x', libc::PROT_EXEC),
        shared: flags.get(3) == Some(&b's'),
        offset,
        device: (hex(major)? as u32, hex(minor)? as u32),
        inode,
        name: unescape(name),
        vm_flags: None,
    })
}

fn hex(word: &str) -> Option<u64> {
    u64::from_str_radix(word, 16).ok()
}

/// Decodes a path, in which the kernel writes a newline as `\012`.
fn unescape(name: &[u8]) -> Vec<u8> {
    let mut decoded = Vec::with_capacity(name.len());
    let mut rest = name;
    while let Some((first, tail)) = rest.split_first() {
        if let Some(after) = rest.strip_prefix(b"\\012") {
            decoded.push(b'\n');
            rest = after;
        } else {
            decoded.push(*first);
            rest = tail;
        }
    }
    decoded
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn smaps_text_parses() {
        let text = b"7f0000001000-7f0000003000 r-xp 00002000 08:01 42    /a b\\012c (deleted)\nSize: 8 kB\n\
            VmFlags: rd ex mr lo wf \n7ffe00000000-7ffe00021000 rw-p 00000000 00:00 0 [stack]\nVmFlags: rd wr gd \n";
        let found = parse_maps(text).expect("parses");
        assert_eq!(found.len(), 2);
        assert_eq!(found[0].name, b"/a b\nc (deleted)");
        assert_eq!(found[0].protection, libc::PROT_READ | libc::PROT_EXEC);
        assert_eq!(
            (found[0].offset, found[0].device, found[0].inode),
            (0x2000, (8, 1), 42)
        );
        assert_eq!(
            found[0].vm_flags,
            Some(VmFlags(VmFlags::LOCKED | VmFlags::WIPE_ON_FORK))
        );
        assert!(
            found[1]
                .vm_flags
                .expect("flags")
                .has_any(VmFlags::GROWS_DOWN)
        );
    }

    #[test]
    fn smaps_and_maps_give_the_same_mappings() {
        let pid = std::process::id();
        let read = |name: &str| std::fs::read(format!("/proc/{pid}/{name}")).expect("readable");
        // Other tests sometimes map memory at the same time.
        let same = || {
            let (before, all, after) = (read("maps"), read("smaps"), read("maps"));
            before == after && smaps_to_maps(&all) == before
        };
        assert!((0..1000).any(|_| same()));
    }

    #[test]
    fn own_maps_parse() {
        let text = std::fs::read("/proc/self/smaps").expect("readable");
        let found = parse_maps(&text).expect("parses");
        assert!(found.iter().any(|map| map.name == b"[stack]"));
        assert!(
            found
                .iter()
                .all(|map| map.vm_flags.is_some() && map.start < map.end)
        );
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = parse_maps(&bytes);
        }
    }
}
