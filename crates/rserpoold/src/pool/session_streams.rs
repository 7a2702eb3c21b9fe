//! Sessions with elements over TCP and UDP: one task for each.

use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use bytes::Bytes;
use holdfast_api::pool::DATA_BYTES_MAX;
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpStream, UdpSocket};
use tokio::runtime::Handle;
use tokio::sync::{OwnedSemaphorePermit, mpsc};

use super::requests::{ByteGauge, PoolRequest, StreamEvent};
use crate::mailbox::Mailbox;

/// Maximum number of bytes queued for a session's program, beyond which nothing more is read. The transport then slows
/// the element down.
const UNREAD_BYTES_MAX: usize = 1 << 20;

/// Transport of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StreamKind {
    Tcp,
    Udp,
}

/// Data that a session's stream sends, or the end of the data.
pub(super) enum StreamOutput {
    /// Bytes, with the permit for their program's unsent bytes.
    Data(Bytes, Option<OwnedSemaphorePermit>),
    /// The end of the data, after which nothing is sent.
    Finish,
}

/// Handle of a stream. Dropping it ends the stream.
type StreamHandle = mpsc::UnboundedSender<StreamOutput>;

/// TCP connections and UDP sockets of sessions, by number.
pub(super) struct SessionStreams {
    handles: HashMap<u64, StreamHandle>,
    opened: u64,
    /// Mailbox of the event loop, for the streams' events.
    mailbox: Mailbox<PoolRequest>,
    /// The thread that runs the streams.
    runtime: Handle,
}

impl SessionStreams {
    /// Starts without streams.
    pub(super) fn new(mailbox: Mailbox<PoolRequest>, runtime: Handle) -> SessionStreams {
        SessionStreams {
            handles: HashMap::new(),
            opened: 0,
            mailbox,
            runtime,
        }
    }

    /// Opens a TCP connection or UDP socket. `unread` counts the bytes queued for the session's program. Returns the
    /// stream's number.
    pub(super) fn open(
        &mut self,
        kind: StreamKind,
        address: SocketAddr,
        unread: Arc<ByteGauge>,
    ) -> u64 {
        self.opened += 1;
        let number = self.opened;
        let (sender, sent) = mpsc::unbounded_channel();
        self.handles.insert(number, sender);
        let task = StreamTask {
            number,
            mailbox: self.mailbox.clone(),
            unread,
        };
        self.runtime.spawn(run(task, kind, address, sent));
        number
    }

    /// Sends data or an end. Returns false if the stream has ended, which an event reports.
    pub(super) fn send(&self, number: u64, output: StreamOutput) -> bool {
        let stream = self.handles.get(&number);
        stream.is_some_and(|stream| stream.send(output).is_ok())
    }

    /// Ends the TCP connection or UDP socket with this number.
    pub(super) fn close(&mut self, number: u64) {
        self.handles.remove(&number);
    }
}

/// Data of the task that runs a session's TCP connection or UDP socket.
struct StreamTask {
    /// Number of the stream.
    number: u64,
    mailbox: Mailbox<PoolRequest>,
    /// Bytes queued for the session's program.
    unread: Arc<ByteGauge>,
}

impl StreamTask {
    async fn send_event(&self, event: StreamEvent) {
        self.mailbox
            .send(PoolRequest::Stream(self.number, event))
            .await;
    }

    async fn send_data(&self, mut bytes: Vec<u8>) {
        // Events may wait for long, and most reads are much shorter than the buffer.
        bytes.shrink_to_fit();
        self.send_event(StreamEvent::Data(bytes)).await;
    }
}

/// Connects, and transfers data both ways until either side ends the stream.
async fn run(
    task: StreamTask,
    kind: StreamKind,
    address: SocketAddr,
    outputs: mpsc::UnboundedReceiver<StreamOutput>,
) {
    let ended = match kind {
        StreamKind::Tcp => run_tcp(&task, address, outputs).await,
        StreamKind::Udp => run_udp(&task, address, outputs).await,
    };
    if let Err(error) = &ended {
        tracing::debug!(%address, %error, "a session's stream failed");
    }
    let in_order = ended.is_ok();
    task.send_event(StreamEvent::Down { in_order }).await;
}

async fn run_tcp(
    task: &StreamTask,
    address: SocketAddr,
    mut sent: mpsc::UnboundedReceiver<StreamOutput>,
) -> io::Result<()> {
    let stream = tokio::select! {
        stream = TcpStream::connect(address) => stream?,
        // The session moves to another element before the connection is up.
        () = wait_abandoned(&mut sent) => return Ok(()),
    };
    stream.set_nodelay(true)?;
    task.send_event(StreamEvent::Up).await;
    let (reader, mut writer) = stream.into_split();
    let read = async {
        loop {
            task.unread.wait_at_most(UNREAD_BYTES_MAX).await;
            // A buffer is allocated only once the pool element has sent data, since most sessions are silent.
            reader.readable().await?;
            let mut bytes = Vec::with_capacity(DATA_BYTES_MAX);
            match reader.try_read_buf(&mut bytes) {
                Ok(0) => return io::Result::Ok(()),
                Ok(_) => task.send_data(bytes).await,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
        }
    };
    let write = async {
        while let Some(next) = sent.recv().await {
            match next {
                StreamOutput::Data(bytes, _room) => writer.write_all(&bytes).await?,
                StreamOutput::Finish => writer.shutdown().await?,
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
async fn wait_abandoned(outputs: &mut mpsc::UnboundedReceiver<StreamOutput>) {
    while outputs.recv().await.is_some() {}
}

async fn run_udp(
    task: &StreamTask,
    address: SocketAddr,
    mut sent: mpsc::UnboundedReceiver<StreamOutput>,
) -> io::Result<()> {
    let any: SocketAddr = match address {
        SocketAddr::V4(_) => ([0; 4], 0).into(),
        SocketAddr::V6(_) => ([0; 16], 0).into(),
    };
    let socket = UdpSocket::bind(any).await?;
    socket.connect(address).await?;
    task.send_event(StreamEvent::Up).await;
    let read = async {
        loop {
            task.unread.wait_at_most(UNREAD_BYTES_MAX).await;
            socket.readable().await?;
            let mut bytes = Vec::with_capacity(usize::from(u16::MAX));
            match socket.try_recv_buf(&mut bytes) {
                Ok(length) if length > DATA_BYTES_MAX => {
                    tracing::warn!(%address, length, "dropped a datagram that exceeds the message limit");
                }
                Ok(_) => task.send_data(bytes).await,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return io::Result::Err(error),
            }
        }
    };
    let write = async {
        while let Some(next) = sent.recv().await {
            if let StreamOutput::Data(bytes, _room) = next {
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
