//! Generated captures for tests.

use std::io::Write;

use etherparse::{PacketBuilder, TcpOptionElement};

use super::{CapturedConnection, analyse, read_capture_file};

pub const SYN: u8 = 1;
pub const FIN: u8 = 2;
pub const RST: u8 = 4;

/// A capture under construction: times in microseconds, sequence numbers relative to each side's first data byte.
pub struct CaptureBuilder {
    pub bytes: Vec<u8>,
    now_us: u64,
    pub server_isn: u32,
    pub is_ipv6: bool,
    pub clock: Option<u32>,
}

impl CaptureBuilder {
    pub fn new() -> Self {
        let header = [0xa1b2_3c4d, 0x0004_0002, 0, 0, 128, 1u32];
        let file = header.iter().flat_map(|word| word.to_le_bytes()).collect();
        // The server's data soon passes the wrap of sequence numbers.
        Self {
            bytes: file,
            now_us: 1_000_000,
            server_isn: u32::MAX - 2000,
            is_ipv6: false,
            clock: None,
        }
    }

    pub fn established() -> Self {
        let mut story = Self::new();
        story.client_segment(0, SYN, u32::MAX, 0, 0);
        story.server_segment(100, SYN, u32::MAX, 0, 0);
        story.client_segment(100, 0, 0, 0, 0);
        story
    }

    pub fn client_segment(
        &mut self,
        after_us: u64,
        flags: u8,
        sequence: u32,
        acknowledges: u32,
        length: u32,
    ) -> &mut Self {
        let (sequence, acknowledges) = (
            1000u32.wrapping_add(sequence),
            self.server_isn.wrapping_add(acknowledges),
        );
        self.segment(after_us, true, flags, sequence, acknowledges, 500, length)
    }

    pub fn server_segment(
        &mut self,
        after_us: u64,
        flags: u8,
        sequence: u32,
        acknowledges: u32,
        length: u32,
    ) -> &mut Self {
        let (sequence, acknowledges) = (
            self.server_isn.wrapping_add(sequence),
            1000u32.wrapping_add(acknowledges),
        );
        self.segment(after_us, false, flags, sequence, acknowledges, 500, length)
    }

    #[allow(clippy::too_many_arguments)]
    pub fn segment(
        &mut self,
        after_us: u64,
        by_client: bool,
        flags: u8,
        sequence: u32,
        acknowledges: u32,
        window: u16,
        length: u32,
    ) -> &mut Self {
        let (from, to) = if by_client { (2, 1) } else { (1, 2) };
        let ports = if by_client { (5000, 80) } else { (80, 5000) };
        let link = PacketBuilder::ethernet2([2, 0, 0, 0, 0, from], [2, 0, 0, 0, 0, to]);
        let mut long = [0; 16];
        long[0] = 0xfd;
        let ends = [from, to].map(|end| {
            let mut address = long;
            address[15] = end;
            address
        });
        let ip = match self.is_ipv6 {
            true => link.ipv6(ends[0], ends[1], 64),
            false => link.ipv4([10, 0, 0, from], [10, 0, 0, to], 64),
        };
        let mut tcp = ip.tcp(ports.0, ports.1, sequence, window);
        if flags & SYN != 0 {
            tcp = tcp.syn();
        }
        if flags & FIN != 0 {
            tcp = tcp.fin();
        }
        if flags & RST != 0 {
            tcp = tcp.rst();
        }
        if flags & SYN == 0 || !by_client {
            tcp = tcp.ack(acknowledges);
        }
        if let Some(clock) = self.clock {
            tcp = tcp
                .options(&[TcpOptionElement::Timestamp(clock, 0)])
                .unwrap();
        }
        let mut packet = Vec::new();
        tcp.write(&mut packet, &vec![7; length as usize]).unwrap();
        self.now_us += after_us;
        let kept = packet.len().min(128) as u32;
        let seconds = (self.now_us / 1_000_000) as u32;
        let nanoseconds = (self.now_us % 1_000_000) as u32 * 1000;
        for word in [seconds, nanoseconds, kept, packet.len() as u32] {
            self.bytes.extend(word.to_le_bytes());
        }
        self.bytes.extend(&packet[..kept as usize]);
        self
    }

    pub fn write_file(&self) -> tempfile::NamedTempFile {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(&self.bytes).unwrap();
        file
    }

    pub fn connection(&self) -> CapturedConnection {
        let mut all = analyse(&read_capture_file(self.write_file().path()).unwrap());
        assert_eq!(all.len(), 1);
        all.remove(0)
    }
}
