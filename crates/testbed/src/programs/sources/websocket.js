// A WebSocket server that sends back what comes: websocket.js ADDRESS PORT
const { WebSocketServer } = require('ws');

const [host, port] = process.argv.slice(2);
const server = new WebSocketServer({ host, port: Number(port), perMessageDeflate: false });
server.on('connection', (socket) => {
  socket.on('message', (data, isBinary) => socket.send(data, { binary: isBinary }));
});
