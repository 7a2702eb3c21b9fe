//! Sessions with elements over TCP and UDP: one task for each.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use bytes::Bytes;
use holdfast_api::pool::DATA_BYTES_MAX;
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpStream, UdpSocket};
use tokio::sync::{OwnedSemaphorePermit, mpsc};

use super::requests::{Gauge, Request, StreamEvent};
use crate::mailbox::Mailbox;

/// Maximum number of bytes queued for a session's program, beyond which nothing more is read. The transport then slows
/// the element down.
const UNREAD_BYTES_MAX: usize = 1 << 20;

/// Transport of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Tcp,
    Udp,
}

/// Data or end to be sent.
pub(super) enum Sent {
    /// Bytes, with the permit for their program's unsent bytes.
    Data(Bytes, Option<OwnedSemaphorePermit>),
    /// The end of the data.
    Finish,
}

/// Handle of a stream. Dropping it ends the stream.
pub(super) type StreamHandle = mpsc::UnboundedSender<Sent>;

/// Owner of a stream.
pub(super) struct Ends {
    /// Number of the stream.
    pub(super) number: u64,
    pub(super) to: Mailbox<Request>,
    /// Bytes queued for its program.
    pub(super) unread: Arc<Gauge>,
}

impl Ends {
    async fn tell(&self, event: StreamEvent) {
        self.to.send(Request::Stream(self.number, event)).await;
    }

    async fn tell_data(&self, mut bytes: Vec<u8>) {
        // Events may wait for long, and most reads are much shorter than the buffer.
        bytes.shrink_to_fit();
        self.tell(StreamEvent::Data(bytes)).await;
    }
}

/// Connects, and transfers data both ways until either side ends the stream.
pub(super) async fn run(
    ends: Ends,
    kind: Kind,
    address: SocketAddr,
    sent: mpsc::UnboundedReceiver<Sent>,
) {
    let ended = match kind {
        Kind::Tcp => tcp(&ends, address, sent).await,
        Kind::Udp => udp(&ends, address, sent).await,
    };
    if let Err(error) = &ended {
        tracing::debug!(%address, %error, "a session's stream");
    }
    let in_order = ended.is_ok();
    ends.tell(StreamEvent::Down { in_order }).await;
}

async fn tcp(
    ends: &Ends,
    address: SocketAddr,
    mut sent: mpsc::UnboundedReceiver<Sent>,
) -> io::Result<()> {
    let stream = tokio::select! {
        stream = TcpStream::connect(address) => stream?,
        // The session moves to another element before the connection is up.
        () = abandoned(&mut sent) => return Ok(()),
    };
    stream.set_nodelay(true)?;
    ends.tell(StreamEvent::Up).await;
    let (reader, mut writer) = stream.into_split();
    let read = async {
        loop {
            ends.unread.at_most(UNREAD_BYTES_MAX).await;
            // A buffer is allocated only once data is there, since most sessions are silent.
            reader.readable().await?;
            let mut bytes = Vec::with_capacity(DATA_BYTES_MAX);
            match reader.try_read_buf(&mut bytes) {
                Ok(0) => return io::Result::Ok(()),
                Ok(_) => ends.tell_data(bytes).await,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
        }
    };
    let write = async {
        while let Some(next) = sent.recv().await {
            match next {
                Sent::Data(bytes, _room) => writer.write_all(&bytes).await?,
                Sent::Finish => writer.shutdown().await?,
            }
        }
        io::Result::Ok(())
    };
    tokio::select! {
        read = read => read,
        write = write => write,
    }
}

/// Ends when all senders are gone. Data sent before the stream is up is dropped.
async fn abandoned(sent: &mut mpsc::UnboundedReceiver<Sent>) {
    while sent.recv().await.is_some() {}
}

async fn udp(
    ends: &Ends,
    address: SocketAddr,
    mut sent: mpsc::UnboundedReceiver<Sent>,
) -> io::Result<()> {
    let any: SocketAddr = match address {
        SocketAddr::V4(_) => ([0; 4], 0).into(),
        SocketAddr::V6(_) => ([0; 16], 0).into(),
    };
    let socket = UdpSocket::bind(any).await?;
    socket.connect(address).await?;
    ends.tell(StreamEvent::Up).await;
    let read = async {
        loop {
            ends.unread.at_most(UNREAD_BYTES_MAX).await;
            socket.readable().await?;
            let mut bytes = Vec::with_capacity(usize::from(u16::MAX));
            match socket.try_recv_buf(&mut bytes) {
                Ok(length) if length > DATA_BYTES_MAX => {
                    tracing::warn!(%address, length, "a datagram longer than a session's messages is dropped");
                }
                Ok(_) => ends.tell_data(bytes).await,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return io::Result::Err(error),
            }
        }
    };
    let write = async {
        while let Some(next) = sent.recv().await {
            if let Sent::Data(bytes, _room) = next {
                socket.send(&bytes).await?;
            }
        }
        io::Result::Ok(())
    };
    tokio::select! {
        read = read => read,
        write = write => write,
    }
}
