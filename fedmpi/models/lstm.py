"""Recurrent networks for language modelling."""

from torch import nn


class LSTM(nn.Module):
    """Embedding, LSTM, linear decoder: 50.1 million parameters at WikiText-2's 33,278 words.

    Dropout acts on the embedding, between the layers and on the output. Embedding and decoder do not
    share weights; both start uniform on (-0.1, 0.1), the decoder's bias at 0.

    Args:
        num_classes: number of words.
        hidden: width of embedding and LSTM. layers: number of LSTM layers.
        dropout: probability of dropping a unit in training, in [0, 1).

    Source: the FAFED paper's network for WikiText-2; initialisation as in its public code.
    """

    def __init__(self, num_classes, hidden: int = 650, layers: int = 2, dropout: float = 0.5):
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.embedding = nn.Embedding(num_classes, hidden)
        self.lstm = nn.LSTM(hidden, hidden, layers, dropout=dropout if layers > 1 else 0.0)
        self.decoder = nn.Linear(hidden, num_classes)
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)
        nn.init.uniform_(self.decoder.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)

    def forward(self, tokens, state=None):
        """(scores, state) after reading `tokens`.

        Args:
            tokens: [steps, columns] int64. state: as returned by the previous call; None: zeros.

        Returns:
            scores: [steps, columns, num_classes] of the next token; state: a pair of tensors.
        """
        outputs, state = self.lstm(self.dropout(self.embedding(tokens)), state)
        return self.decoder(self.dropout(outputs)), state
