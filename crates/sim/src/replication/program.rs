//! The server program: its output is a function of the connection's input.

/// An input byte that makes the server answer at length.
pub(super) const DOWNLOAD: u8 = 0xff;
/// An input byte that makes the server close the connection after its answer.
pub(super) const QUIT: u8 = 0xfe;
/// Length of a long answer, in bytes.
const DOWNLOAD_BYTES: u32 = 4_000;

/// State of the program in one connection.
#[derive(Debug, Default, Clone)]
pub(super) struct Program {
    digest: u32,
    has_quit: bool,
}

impl Program {
    /// Takes an input byte and returns the answer: long, one byte for an even number, or none. Each byte depends on all
    /// input.
    pub fn run(&mut self, byte: u8) -> Vec<u8> {
        if self.has_quit {
            return Vec::new();
        }
        self.digest = self.digest.wrapping_mul(31).wrapping_add(u32::from(byte)) ^ 0x5a5a;
        let length = match byte {
            DOWNLOAD => DOWNLOAD_BYTES,
            QUIT => {
                self.has_quit = true;
                1
            }
            even if even % 2 == 0 => 1,
            _ => 0,
        };
        let byte_at =
            |at: u32| (self.digest.wrapping_add(at.wrapping_mul(0x9e37_79b1)) >> 11) as u8;
        (0..length).map(byte_at).collect()
    }

    pub fn has_quit(&self) -> bool {
        self.has_quit
    }

    /// Returns the answer to a whole input.
    pub fn answer_to(input: &[u8]) -> Vec<u8> {
        let mut program = Program::default();
        input.iter().flat_map(|byte| program.run(*byte)).collect()
    }
}
